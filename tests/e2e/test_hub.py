"""A run whose model comes from a hub, and keeps the commit it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.toy import overrides, rows, write_data, write_model
from tests.hub_server import COMMIT, REPO, serving
from tests.launch import launch


@pytest.mark.full  # in the core tier: unit/run/test_hub.py
def test_a_run_trains_and_resumes_a_model_of_the_hub(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    run_dir = tmp_path / "run"
    with serving(tmp_path / "model") as hub:
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}

        def train(num_steps: int) -> str:
            words = overrides(
                tmp_path, run_dir, f"model.path={REPO}", f"trainer.num_steps={num_steps}"
            )
            return launch("megatron_rl.train", 2, words, 250, env=home, is_warm=False).stdout

        assert f"model.path = {REPO}: commit {COMMIT}" in train(1)
        assert hub.asked.count("model.safetensors") == 1
        hub.branch = "b" * 40
        hub.commits[hub.branch] = {"config.json": b"{}"}
        train(2)
    assert [row["step"] for row in rows(run_dir)][-2:] == [1, 2]
    assert json.loads((run_dir / "config.json").read_text())["model"]["path"].endswith(COMMIT)
