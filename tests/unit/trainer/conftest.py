"""The bandit's runs, and the folder of a run that has been, as fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file

from megatron_rl.config.load import compose
from megatron_rl.runtime import lock
from megatron_rl.trainer.trainer import Trainer
from tests.unit.trainer.runs import build_bandit


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """``build_bandit`` in a folder of the test; the locks of its runs are given back."""
    yield partial(build_bandit, tmp_path)
    for folder in tmp_path.iterdir():
        lock.release(folder)


@pytest.fixture
def run(tmp_path):
    """The folder of a run with an export and no checkpoint yet."""
    model = tmp_path / "model"
    folder = tmp_path / "run"
    for directory in (model, folder / "export"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(
            json.dumps({"architectures": ["X"], "max_position_embeddings": 512})
        )
        save_file({}, directory / "model.safetensors")
    overrides = [
        f"model.path='{model}'",
        "data.train=t.jsonl",
        "data.eval=e.jsonl",
        f"run_dir='{folder}'",
    ]
    values = compose(
        "config", [*overrides, "rollout.max_prompt_tokens=7", "data.prompt_suffix=' think'"]
    )
    (folder / "config.json").write_text(
        json.dumps(values | {"versions": {}, "git_commit": None, "world_size": 8})
    )
    return folder
