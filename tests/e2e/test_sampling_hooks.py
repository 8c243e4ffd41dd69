"""The sampling hooks of the package in the real trainer, all in one run; and what they remember
goes on with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy import overrides, untimed_rows
from tests.launch import launch

pytestmark = pytest.mark.full
SETTINGS = (
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
    "batch.responses_per_prompt=8",
    "batch.prompts_per_step=4",
    "batch.prompts_per_minibatch=2",
    "rollout_hooks.vcrl.kappa=0.2",
    "rollout_hooks.dars.schedule=hw",
    "rollout_hooks.dars.max_responses=12",
    "rollout_hooks.erpo.increase=0.2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)


def train(folder: Path, name: str, num_steps: int) -> list[dict]:
    words = overrides(folder, folder / name, *SETTINGS, f"trainer.num_steps={num_steps}")
    launch("megatron_rl.train", 2, words, timeout=400)
    return untimed_rows(folder / name)


def test_steps_are_trained_and_hooks_go_on_with_a_checkpoint(folder: Path) -> None:
    whole = train(folder, "whole", 4)
    assert sum(row["hook/vcrl/refused_groups"] for row in whole) > 0
    assert sum(row["hook/vcrl/replayed_groups"] for row in whole) > 0
    assert sum(row["hook/dars/hard_groups"] for row in whole) > 0
    sizes = [row["rollout/num_responses"] for row in whole]
    assert len(set(sizes)) > 1 and max(sizes) > 8, "groups have grown"
    assert all("hook/erpo/residual_groups" in row for row in whole)
    train(folder, "parts", 2)
    assert train(folder, "parts", 4) == whole
