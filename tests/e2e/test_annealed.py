"""Annealed sampling in the real trainer: sampler and policy agree on every token, steps go on with
a checkpoint, and the ways of correcting a policy at temperature 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.toy import overrides, untimed_rows
from tests.launch import launch

pytestmark = pytest.mark.full
BOUND = 1e-5  # nats of one token; both sides compute in float32
SETTINGS = (
    "rollout.anneal.start=1.5",
    "rollout.anneal.end=0.5",
    "rollout.anneal.decay_tokens=3.0",
    "rollout.anneal.decay_growth=1.0",
    "rollout.anneal.plain_tokens=1",
    "rollout.anneal.policy=annealed",
    "rollout.max_response_tokens=8",
    "batch.responses_per_prompt=4",
    "weight_sync.logprob_check_every=1",
    f"weight_sync.logprob_check_tolerance={BOUND}",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)
PLAIN_POLICY = (
    "rollout.anneal.policy=plain",
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
)
PARTIAL = (
    "rollout.anneal.decay_growth=0.0",
    "rollout.max_response_tokens=24",
    "source.partial.groups_in_flight=16",
    "batch.responses_per_prompt=2",
    "batch.prompts_per_minibatch=8",
    "optim.learning_rate=1e-20",
    "method.mismatch.kind=tis",
    "method.mismatch.cap=2.0",
    "mismatch_limits.abort_above=null",
)


def train(folder: Path, name: str, *more: str) -> list[dict[str, float]]:
    """The step rows. ``mismatch_limits.abort_above`` ends a run unless ``more`` says otherwise."""
    limit = f"mismatch_limits.abort_above={BOUND}"
    words = overrides(folder, folder / name, *SETTINGS, limit, *more)
    launch("megatron_rl.train", 2, words, timeout=400)
    return [row for row in untimed_rows(folder / name) if row["step"] > 0]


def test_the_policy_scores_what_was_sampled_and_goes_on_with_a_checkpoint(folder: Path) -> None:
    whole = train(folder, "whole", "trainer.num_steps=3")
    assert [row["rollout/anneal_decay_tokens"] for row in whole] == [3, 4, 5]
    for row in whole:
        assert row["mismatch/logprob_abs_diff_max"] <= BOUND
        assert row["sync/logprob_check_diff"] <= BOUND, "at temperature 1, prompt and response"
        assert row["rollout/temperature_min"] < 1 < 1.2 > row["rollout/temperature_mean"]
        assert row["optim/grad_norm"] > 0
    train(folder, "parts", "trainer.num_steps=2")
    assert train(folder, "parts", "trainer.num_steps=3") == whole


def test_a_policy_at_temperature_1_differs_by_the_temperatures(folder: Path) -> None:
    (row,) = train(folder, "plain", *PLAIN_POLICY, "trainer.num_steps=1")
    assert row["mismatch/logprob_abs_diff_max"] > 0.1
    assert row["optim/grad_norm"] > 0


def test_responses_that_go_on_in_the_next_step(folder: Path) -> None:
    """The weights stay as they were, so sampler and policy agree on every token where both know how
    many were before it."""
    rows = train(folder, "partial", *PARTIAL, "trainer.num_steps=3")
    assert any(row["source/mixed_share"] > 0 for row in rows)
    assert max(row["mismatch/logprob_abs_diff_max"] for row in rows) <= BOUND


def test_a_minibatch_is_replayed_with_its_temperatures(folder: Path) -> None:
    more = ("batch.prompts_per_minibatch=8", "nonfinite.bundle_step=1", "trainer.num_steps=1")
    (row,) = train(folder, "bundled", *more)
    result = folder / "replay.json"
    bundle = folder / "bundled" / "nonfinite" / "step_000001"
    launch("tools/replay_step.py", 2, [bundle, "--json", result], timeout=200)
    whole = json.loads(result.read_text())["whole"]
    assert (whole["loss"], whole["grad_norm"]) == (row["loss/total"], row["optim/grad_norm"])
