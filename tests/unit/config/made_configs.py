"""Configurations for the tests of their rules, of a model that is a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.checks import check
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError

ROWS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
REQUIRED = ("model.path=/m", "data.train=t.jsonl", "data.eval=e.jsonl")


def config(*overrides: str) -> Config:
    """That of the overrides; what must be given has a name without a file."""
    return validate(Config, compose("config", [*REQUIRED, *overrides]), "the configuration")


def problems_in(folder: Path, model: dict[str, Any], *settings: str) -> Callable[..., list[str]]:
    """``problems(world_size, *overrides)``: what is wrong with a run of ``model``."""
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "data.jsonl").write_text("{}")
    data = f"{folder}/data.jsonl"
    paths = (f"model.path={folder}", f"data.train={data}", f"data.eval={data}")

    def problems(world_size: int, *overrides: str, by: Any = check, machine: Any = None):
        try:
            by(config(*paths, *settings, *overrides), world_size, machine)
        except ConfigError as error:
            return error.problems
        return []

    return problems
