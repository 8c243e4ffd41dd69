"""Truncated sampling in the real trainer: sampler and policy agree on every token, with two updates
a step, on ranks that share the vocabulary and on ranks that share the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_nonfinite import replayed
from tests.e2e.toy import overrides, untimed_rows
from tests.launch import launch

pytestmark = pytest.mark.full
BOUND = 1e-5  # nats of one token; both sides compute in float32
SETTINGS = (
    "rollout.top_p=0.9",
    "rollout.top_k=8",
    "rollout.temperature=0.8",
    "rollout.max_response_tokens=8",
    "batch.responses_per_prompt=4",
    "method.kl.coef=0.01",
    "weight_sync.logprob_check_every=1",
    f"weight_sync.logprob_check_tolerance={BOUND}",
    f"mismatch_limits.abort_above={BOUND}",
    "evaluation.at_start=false",
    "evaluation.at_end=true",
    "evaluation.top_p=0.7",
    "evaluation.temperature=1.0",
)


def train(folder: Path, name: str, *more: str) -> list[dict[str, float]]:
    """The step rows."""
    words = overrides(folder, folder / name, *SETTINGS, *more)
    launch("megatron_rl.train", 2, words, timeout=400)
    return [row for row in untimed_rows(folder / name) if row["step"] > 0]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="tensor"),
        pytest.param(
            (
                "parallel=single",
                "rollout.tensor=1",
                "rollout.anneal.start=1.3",
                "rollout.anneal.end=0.7",
                "rollout.anneal.decay_tokens=3.0",
                "rollout.anneal.policy=annealed",
                "rollout.temperature=1.0",
            ),
            id="data, annealed",
        ),
    ],
)
def test_the_policy_scores_what_was_sampled(folder: Path, more: tuple[str, ...]) -> None:
    rows = train(folder, f"whole{len(more)}", "trainer.num_steps=3", *more)
    assert len(rows) >= 3
    for row in rows[:3]:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert row["optim/grad_norm"] > 0
        assert row["policy/ratio_max"] > 1, "the second update has moved"


def test_a_step_on_disk_replays_with_its_kept_tokens(folder: Path) -> None:
    one_update = ("trainer.num_steps=1", "batch.prompts_per_minibatch=8", "nonfinite.bundle_step=1")
    row, *_ = train(folder, "bundled", *one_update)
    _, same = replayed(folder, folder / "bundled" / "nonfinite" / "step_000001", 2)
    assert same["whole"]["loss"] == row["loss/total"]
    assert same["whole"]["grad_norm"] == row["optim/grad_norm"]
