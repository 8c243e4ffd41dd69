"""What a rank tells the others of its completions: flat buffers, from which every rank makes the
same batch."""

from __future__ import annotations

import pickle
import random
from array import array
from typing import Any

import numpy as np
import torch

from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.exchange import exchange_rows, flattened, token_rows
from megatron_rl.trainer.experience import Response, experience_of
from megatron_rl.trainer.ownership import Route
from megatron_rl.trainer.rollouts import Sampler
from megatron_rl.types import Completion, Prompt, Sampling, Score

NUM_PROMPTS, PER_PROMPT = 6, 4
# Two numbers of 32 bits for a token, and a little for each response.
MAX_BYTES_PER_TOKEN = 8.5


def completions(shortest: int = 100) -> list[list[Completion]]:
    draw = random.Random(3)

    def completion() -> Completion:
        size = draw.randrange(shortest, shortest + 300)
        ids = [draw.randrange(150_000) for _ in range(size)]
        return Completion(
            ids, [-draw.random() for _ in range(size)], draw.random() < 0.3, draw.randrange(5)
        )

    return [[completion() for _ in range(PER_PROMPT)] for _ in range(NUM_PROMPTS)]


def num_tokens(groups: list[list[Completion]]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group)


class TwoRanks:
    """A world in which another rank leads the second replica, and everything travels as a
    pickle."""

    rank, size = 0, 2

    def __init__(self, theirs: list[list[Completion]]) -> None:
        self.theirs, self.sent = theirs, []

    def all_gather(self, value: Any) -> list[Any]:
        self.sent.append(pickle.dumps(value))
        other = flattened(self.theirs) if len(self.sent) == 1 else []
        return [pickle.loads(self.sent[-1]), pickle.loads(pickle.dumps(other))]


class HalfEngine:
    replica, num_replicas = 0, 2

    def __init__(self, mine: list[list[Completion]]) -> None:
        self.mine = mine

    def generate(
        self, prompts: Any, sampling: Sampling, progress: Any = None
    ) -> list[list[Completion]]:
        assert len(prompts) == len(self.mine)
        return self.mine


def test_no_object_for_a_token_travels():
    groups = completions()
    world = TwoRanks(groups[3:])
    sampler = Sampler(HalfEngine(groups[:3]), None, str, world, Display(shown=False))
    got = sampler._generate(
        [Prompt(f"p{i}", (1,), "", "") for i in range(NUM_PROMPTS)],
        Sampling(PER_PROMPT, 400),
        "test",
    )
    assert got == groups
    assert len(world.sent[0]) / num_tokens(groups[:3]) <= MAX_BYTES_PER_TOKEN


def test_a_completion_is_compact_by_itself():
    groups = completions()
    assert len(pickle.dumps(groups)) / num_tokens(groups) <= MAX_BYTES_PER_TOKEN
    first = groups[0][0]
    assert isinstance(first.token_ids, array) and first.token_ids.itemsize == 4
    assert isinstance(first.sampler_logprobs, array) and first.sampler_logprobs.itemsize == 4


def test_odd_groups_come_back():
    """A rank that leads no replica, a group without completions, a completion without tokens."""
    for groups in (
        [],
        [[]],
        [[Completion((), (), True, -1)], [], [Completion((7,), (-0.5,), False, 9)]],
    ):
        back = pickle.loads(pickle.dumps(flattened(groups))).groups()
        assert back == groups
        assert all(type(completion.truncated) is bool for group in back for completion in group)


def test_the_batch_is_that_of_plain_lists():
    groups = completions(1)
    prompts = [Prompt(f"p{i}", tuple(range(1, 3 + i)), "", "") for i in range(NUM_PROMPTS)]
    responses = [
        [Response(prompt, completion, "", Score(0.0, False)) for completion in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    got = experience_of(responses)
    tokens: list[int] = []
    logprobs: list[float] = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            tokens += [*prompt.token_ids, *completion.token_ids]
            logprobs += completion.sampler_logprobs
    assert torch.equal(got.sequences.token_ids, torch.tensor(tokens))
    assert torch.equal(got.sampler_logprobs, torch.tensor(logprobs, dtype=torch.float32))


def test_completions_become_rows():
    rows = token_rows(
        6,
        [
            Completion((9, 2), (-0.5, -0.25), False, 1),
            Completion((), (), True, 1),
            Completion((7,), (-1.0,), True, 2),
        ],
    )
    assert rows.rows.tolist() == [6, 7, 8]
    assert rows.lengths.tolist() == [2, 0, 1]
    assert rows.columns["token_ids"].tolist() == [9, 2, 7]
    assert rows.columns["token_ids"].dtype == np.int32
    assert rows.columns["sampler_logprobs"].tolist() == [-0.5, -0.25, -1.0]
    assert rows.columns["sampler_logprobs"].dtype == np.float32
    nothing = token_rows(3, [])
    assert [values.dtype for values in nothing.columns.values()] == [np.int32, np.float32]


def test_one_rank_keeps_its_rows():
    rows = token_rows(0, [Completion((9, 2), (-0.5, -0.25), False, 1)])
    here = np.array([0])
    kept = exchange_rows(rows, Route(np.array([2]), here, here), World(0, 1, 0, "test"))
    assert kept.columns["token_ids"].tolist() == [9, 2]
