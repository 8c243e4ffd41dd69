"""Fixtures of several folders: tables of the process as they were, and a vision-language model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL with random weights, its tokenizer and image processor."""
    from tests.unit.data.pictures import seeing_model

    return seeing_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def vision(seeing_folder: Path) -> Any:
    """The image processor of ``seeing_folder``."""
    from megatron_rl.data.multimodal.vision import VisionProcessor

    return VisionProcessor(seeing_folder)


@pytest.fixture
def world() -> Iterator[Any]:
    """Of this process alone, with a process group."""
    import torch.distributed as dist

    from megatron_rl.runtime.launch import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, 0, "launch")
    dist.destroy_process_group()


@pytest.fixture
def fresh_registries() -> Iterator[None]:
    """Plug-ins change tables of the process: a test that loads some gives them back as they
    were."""
    from megatron_rl import models as families
    from megatron_rl import plugins
    from megatron_rl.config import load
    from megatron_rl.hooks import base as hooks
    from megatron_rl.loss import choices
    from megatron_rl.signals import registry as signals

    tables = [choices.ESTIMATORS, choices.SHAPERS, choices.TOKEN_SHAPERS, choices.POLICY_LOSSES]
    tables += [
        hooks.ROLLOUT_HOOKS,
        families.FAMILIES,
        plugins._sources,
    ]
    tables += [signals._SIGNALS]
    before = [table.copy() for table in tables]
    loaded, folders = list(plugins._loaded), list(load._plugin_dirs)
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
    plugins._loaded[:] = loaded
    load._plugin_dirs[:] = folders
    for name in [name for name in sys.modules if name.startswith("megatron_rl_plugin_")]:
        del sys.modules[name]
