"""Credit, minibatches and old logprobs, with a bandit as the policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.unit.trainer.runs import rows, timeless

ONE_UPDATE = ["batch.prompts_per_minibatch=4", "trainer.num_steps=2"]


def test_two_minibatches_a_step_each_of_whole_groups(build):
    trainer = build()
    trainer.run()
    assert [sum(sizes) for sizes in trainer.learner.policy.microbatch_sizes] == [16] * 6


@pytest.mark.parametrize("method", ["grpo", "pacs"])
def test_the_split_into_microbatches_does_not_change_the_run(build, method):
    """Of pacs also where the responses of a prompt are in different ones."""
    coarse = build("batch.tokens_per_microbatch=4096", method=method)
    fine = build("batch.tokens_per_microbatch=5", method=method, run="fine")
    coarse.run()
    fine.run()
    assert max(len(sizes) for sizes in fine.learner.policy.microbatch_sizes) == 16
    assert max(len(sizes) for sizes in coarse.learner.policy.microbatch_sizes) == 1
    torch.testing.assert_close(
        coarse.learner.policy.logits, fine.learner.policy.logits, rtol=1e-5, atol=1e-6
    )
    for a, b in zip(rows(coarse), rows(fine), strict=True):
        assert timeless(a) == pytest.approx(timeless(b), rel=1e-4, abs=1e-6)


def test_dropped_rows_leave_the_update_and_an_empty_minibatch_takes_no_step(build):
    trainer = build(method="grpo", method_overrides=["filters.drop_all_correct=true"])
    trainer.learner.policy.logits[2] = 40.0
    trainer.run()
    assert trainer.learner.policy.microbatch_sizes == []
    assert [row["optim/empty_minibatches"] for row in rows(trainer)[1:]] == [2, 2, 2]


@pytest.mark.parametrize("entropy", ["entropy.metric=true", "entropy.metric=false"])
def test_an_only_update_uses_its_own_forward_for_the_old_logprobs_and_changes_nothing(
    build, entropy
):
    overrides = [entropy, "kl.coef=0"]
    once = build(*ONE_UPDATE, method_overrides=overrides, run="once")
    twice = build(*ONE_UPDATE, method_overrides=overrides, run="twice")
    twice = replace(twice, learner=replace(twice.learner, update_matches_score=False))
    once.run()
    twice.run()
    assert once.learner.policy.passes == ["update"] * 2
    assert twice.learner.policy.passes == ["score", "update"] * 2
    pairs = zip(rows(once)[1:], rows(twice)[1:], strict=True)
    for row, other in pairs:
        assert timeless(row) == timeless(other)
        assert ("rollout/entropy" in row) == ("true" in entropy)
    assert torch.equal(once.learner.policy.logits, twice.learner.policy.logits)


def test_old_logprobs_take_a_pass_of_their_own_where_an_update_cannot_give_them(build):
    several = build("trainer.num_steps=1", method_overrides=["kl.coef=0"], run="several")
    several.run()
    assert several.learner.policy.passes == ["score", "update", "update"], "two minibatches"
    statistics = build(
        *ONE_UPDATE, method_overrides=["kl.placement=reward", "kl.coef=0.1"], run="statistics"
    )
    statistics.run()
    assert statistics.learner.policy.passes == ["reference", "score", "update"] * 2, (
        "the divergence is part of the reward"
    )
    dropped = build(
        *ONE_UPDATE, method_overrides=["filters.drop_all_correct=true", "kl.coef=0"], run="dropped"
    )
    dropped.learner.policy.logits[2] = 3.0
    dropped.run()
    passes = dropped.learner.policy.passes[:2]
    assert passes == ["score", "update"], "rows without an update have a mismatch too"
    assert 0 < dropped.learner.policy.microbatch_sizes[0][0] < 32


def test_later_epochs_of_a_rollout_visit_all_groups_in_another_order(build):
    trainer = build("trainer.epochs_per_rollout=2", "batch.prompts_per_minibatch=1")
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.learner.score(trainer.source.next(1))
    minibatches = list(trainer.learner.plan.minibatches(1, experience))
    assert sorted(map(tuple, minibatches[:4])) == sorted(map(tuple, minibatches[4:]))
    assert minibatches[:4] == sorted(minibatches[:4])
    assert minibatches[:4] != minibatches[4:]
    assert minibatches == list(trainer.learner.plan.minibatches(1, experience))


def test_pacs_scores_every_minibatch_before_its_update_but_an_only_one(build):
    """The loss of a minibatch reads sums under the weights that it starts from."""
    several = build("trainer.num_steps=1", method="pacs", run="several")
    several.run()
    passes = several.learner.policy.passes
    assert passes == ["score", "score", "update", "score", "update"]
    once = build(*ONE_UPDATE, method="pacs", run="once")
    once.run()
    assert once.learner.policy.passes == ["update"] * 2
    first, second = rows(once)[1:]
    assert [first["loss/policy"], second["loss/policy"]] == pytest.approx([math.log(2)] * 2)
    assert rows(several)[1]["loss/policy"] != pytest.approx(math.log(2), abs=1e-4)
