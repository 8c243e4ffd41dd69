"""Responses of a step: some of them, and what they cost in objects."""

from __future__ import annotations

import gc
import sys

import numpy as np

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.rows.experience import Responses, experience_of
from megatron_rl.trainer.placement import Placement
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.engines import Answering
from tests.unit.trainer.fakes import BanditBatching
from tests.unit.trainer.runs import DISPLAY, WORLD


def responses(first: int = 0) -> Responses:
    """Groups of 2, 1 and 2 rows with 1 to 5 tokens; rows 1, 3 and 4 lie here."""
    lengths = np.arange(1, 6)
    prompts = [Prompt(f"p{first + group}", (1,), "", "") for group in (0, 0, 1, 2, 2)]
    here = np.array([1, 3, 4])
    tokens = np.repeat(first + 10 * here, lengths[here])
    columns = {"token_ids": tokens.astype(np.int32), "sampler_logprobs": -tokens.astype(np.float32)}
    return Responses(
        prompts=prompts,
        group_ids=np.array([0, 0, 1, 2, 2]),
        lengths=lengths,
        truncated=lengths > 4,
        weight_versions=lengths + first,
        scores=[Score(float(first + row), False) for row in range(5)],
        tokens=TokenRows(here, lengths[here], columns),
        holders=np.array([0, 1, 0, 1, 1]),
    )


def test_some_rows_get_new_numbers_and_groups():
    some = responses().take([1, 3, 4])
    assert [prompt.uid for prompt in some.prompts] == ["p0", "p2", "p2"]
    assert some.group_ids.tolist() == [0, 1, 1] and some.num_groups == 2
    assert some.lengths.tolist() == [2, 4, 5]
    assert some.truncated.tolist() == [False, False, True]
    assert [score.reward for score in some.scores] == [1, 3, 4]
    assert some.tokens.rows.tolist() == [0, 1, 2]
    assert [set(ids.tolist()) for ids in some.tokens.views("token_ids")] == [{10}, {30}, {40}]
    assert some.holders.tolist() == [1, 1, 1]
    elsewhere = responses().take([2])
    assert len(elsewhere) == 1 and elsewhere.tokens.rows.tolist() == []
    nothing = responses().take([])
    assert len(nothing) == nothing.num_groups == 0


def test_the_order_of_the_rows_asked_for_is_kept():
    turned = responses().take([4, 0, 3])
    assert turned.lengths.tolist() == [5, 1, 4]
    assert dict(zip(turned.tokens.rows.tolist(), turned.tokens.lengths, strict=True)) == {
        0: 5,
        2: 4,
    }


class LongEngine(Answering):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        return Completion([2] * self.tokens, [-0.5] * self.tokens, False, 0)


class NoVerdict:
    def score(self, prompts, texts, truncated):
        return [Score(0.0, False) for _ in texts]


def blocks_of_a_step(tokens: int) -> int:
    """Python objects that stay, from the answer of the engine to the batch of a pass."""
    sampler = LaunchSampler(LongEngine(tokens), NoVerdict(), lambda ids: "", WORLD, DISPLAY)
    prompts = [Prompt(f"p{n}", (1,), "", "") for n in range(8)]
    placement = Placement(BanditBatching(10**6), WORLD)
    gc.collect()
    before = sys.getallocatedblocks()
    responses = sampler.run(prompts, Sampling(4, tokens), "test")
    experience = placement.to_owners(experience_of(responses))
    gc.collect()
    after = sys.getallocatedblocks()
    assert int(experience.responses.lengths.sum()) == 32 * tokens
    return after - before


def test_no_python_object_stays_for_a_token():
    blocks_of_a_step(10)  # what is made once
    # What other tests leave comes and goes in some of the turns; an object of a token stays in all.
    pairs = [(blocks_of_a_step(10), blocks_of_a_step(1000)) for _ in range(3)]
    few, many = min(pairs, key=lambda pair: pair[1] - pair[0])
    assert many - few < 32, f"{few} blocks for 320 tokens, {many} for 32,000"
