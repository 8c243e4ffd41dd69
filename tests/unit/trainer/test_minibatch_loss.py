"""What a method's loss is given of a minibatch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.loss import Method, TokenBatch
from megatron_rl.passes import TokenView
from megatron_rl.trainer.minibatch_loss import MinibatchLoss
from tests.unit.trainer.runs import rows


def test_a_loss_is_given_lengths_and_groups_of_its_minibatch(build, monkeypatch):
    """Lengths of the responses in it, 0 of the others; the accuracy of prompts is that of the whole
    step."""
    trainer = build(method="rl_zvp")
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    experience = trainer.learner.score(trainer.source.next(1))
    assert experience.responses.num_groups == 4 and len(experience.responses) == 32
    chosen = list(range(8, 24))
    given: list[TokenBatch] = []
    plain = Method.loss

    def recorded(self, batch, **over_ranks):
        given.append(batch)
        return plain(self, batch, **over_ranks)

    monkeypatch.setattr(Method, "loss", recorded)
    learner = trainer.learner
    placed = learner.placement.rebalanced_for(experience, chosen)
    loss = MinibatchLoss(
        learner.method, learner.signals, experience, chosen, placed.tokens, placed.local
    )
    tokens = torch.zeros(3)
    loss(TokenView(torch.arange(3), tokens, {"entropy": tokens + 1}))
    (batch,) = given
    assert batch.response_loss_tokens is not None
    assert batch.response_loss_tokens.tolist() == [0] * 8 + [3] * 16 + [0] * 8
    assert (batch.num_responses, batch.num_tokens) == (16, 48)
    by_group = experience.correct.reshape(4, 8).float().mean(1)
    accuracy = batch.columns["group_accuracy"].reshape(4, 8)
    assert torch.equal(accuracy, by_group[:, None].expand(4, 8))
    assert batch.token_columns["entropy"].tolist() == [1, 1, 1]


def test_tokens_that_nobody_sampled_are_in_no_loss_and_no_denominator(build, monkeypatch):
    """The last of the three tokens of each response came from elsewhere."""
    trainer = build(method="durian_reasoning")
    trainer.folder.path.mkdir()
    trainer.source.publish(0)
    learner = trainer.learner
    experience = trainer.source.next(1)
    tokens = experience.responses.tokens
    columns = {**tokens.columns, "sampled": np.tile([True, True, False], 32)}
    responses = replace(experience.responses, tokens=replace(tokens, columns=columns))
    num_sampled = torch.full((32,), 2)
    experience = learner.score(replace(experience, responses=responses, num_sampled=num_sampled))
    assert experience.loss_tokens.tolist() == [2] * 32
    # Every token has probability 1/4 at the start.
    assert experience.columns["mean_logprobs"].tolist() == pytest.approx([-math.log(4)] * 32)
    seen: list[TokenBatch] = []
    plain = Method.loss

    def recorded(self, batch, **over_ranks):
        seen.append(batch)
        return plain(self, batch, **over_ranks)

    monkeypatch.setattr(Method, "loss", recorded)
    learner.update(1, experience)
    assert sum(int(batch.loss_mask.sum()) for batch in seen) == 64
    assert {batch.num_tokens for batch in seen} == {32}  # of the 16 responses of a minibatch


def test_the_trainer_says_how_far_the_run_is(build):
    """CDE over three steps, its bonus from 3 to 0: two thirds, a third and none of the same
    rewards and logprobs are left."""
    trainer = build(
        "optim.learning_rate=1e-9",
        method="cde",
        method_overrides=["reward_shaping.curiosity.start=3", "std_ddof=0"],
    )
    trainer.run()
    found = {row["step"]: row for row in rows(trainer) if row["step"]}
    # Every token has probability 1/4 at the start, so B = log 4 is above |r| / 3.
    first = found[1]["credit/curiosity_bonus_mean"]
    assert first == pytest.approx(2 * found[1]["reward/mean"] / 3)
    assert found[2]["credit/curiosity_bonus_mean"] > 0
    assert found[3]["credit/curiosity_bonus_mean"] == 0
    assert found[3]["reward/mean"] > 0
