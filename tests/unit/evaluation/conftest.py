"""The folder of a run that has been, as a fixture."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from megatron_rl.config.load import compose


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
