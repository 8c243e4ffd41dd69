"""Plain files of {prompt, answer}, mixed by weight, in the real trainer: shares and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.toy import LETTERS, overrides
from tests.launch import launch

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def mixture(folder) -> Path:
    for name, letters in (("few", LETTERS[:3]), ("many", LETTERS[3:])):
        rows = [json.dumps({"prompt": letter, "answer": letter}) for letter in letters]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def train(folder: Path, name: str, num_steps: int, every: int) -> str:
    mixture = [
        f"data.train=[{folder}/few.jsonl,{folder}/many.jsonl]",
        "data.train_weights=[0.75,0.25]",
        "logging.log_samples=128",
        f"trainer.num_steps={num_steps}",
        f"checkpoint.every_steps={every}",
    ]
    return launch("megatron_rl.train", 2, overrides(folder, folder / name, *mixture), 240).stdout


def drawn(folder: Path, name: str) -> dict[int, list[str]]:
    """Step -> uid of every response that was trained on."""
    steps: dict[int, list[str]] = {}
    for line in (folder / name / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append(row["prompt"])
    return steps


def test_weighted_files_keep_their_share_and_go_on_where_they_stopped(mixture):
    folder = mixture
    train(folder, "whole", 4, 4)
    train(folder, "parted", 2, 2)
    assert "resumed from" in train(folder, "parted", 4, 4)
    whole, parted = drawn(folder, "whole"), drawn(folder, "parted")
    assert whole == parted
    for step in range(1, 5):
        few = sum(uid.startswith("few:") for uid in whole[step])
        assert (few, len(whole[step])) == (6 * 16, 8 * 16), "three quarters of eight prompts"
    at_once = load_file(folder / "whole/export/model.safetensors")
    resumed = load_file(folder / "parted/export/model.safetensors")
    assert all(torch.equal(at_once[name], resumed[name]) for name in at_once)
