"""A run whose model comes from a hub, keeps the commit it began with, and is pushed there."""

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

        def train(num_steps: int, *more: str) -> str:
            settings = (f"model.path={REPO}", f"trainer.num_steps={num_steps}", *more)
            words = overrides(tmp_path, run_dir, *settings)
            return launch("megatron_rl.train", 2, words, 250, env=home, is_warm=False).stdout

        assert f"model.path = {REPO}: commit {COMMIT}" in train(1)
        assert hub.asked.count("model.safetensors") == 1
        hub.branch = "b" * 40
        hub.commits[hub.branch] = {"config.json": b"{}"}
        home |= {"HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
        assert "pushed: " in train(2, "hub.push=me/tuned")
        files = hub.pushed["me/tuned"]
        assert f"{REPO} at revision {COMMIT}" in files["README.md"].decode()
        assert files["model.safetensors"] == (run_dir / "export/model.safetensors").read_bytes()
    assert [row["step"] for row in rows(run_dir)][-2:] == [1, 2]
    assert json.loads((run_dir / "config.json").read_text())["model"]["path"].endswith(COMMIT)
