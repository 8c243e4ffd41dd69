"""The settings of a run that has been, and those for a model alone: for programs that ask a model
without training it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import Config
from megatron_rl.run.run_record import read_record
from megatron_rl.run.start import CONFIG


def read_config(folder: Path) -> Mapping[str, Any]:
    """``config.json`` of a run or a model; empty where there is none."""
    values = read_record(folder / CONFIG)
    return values if isinstance(values, Mapping) else {}


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run."""
    return "run_dir" in read_config(folder)


def values_of_run(run: Path) -> dict[str, Any]:
    """The configuration of a run, as it was composed."""
    saved = read_config(run)
    return {key: saved[key] for key in Config.model_fields if key in saved}


def engine_of_machine() -> str:
    """The option of the group ``rollout`` for this machine."""
    return "vllm" if torch.cuda.is_available() else "vllm_cpu"
