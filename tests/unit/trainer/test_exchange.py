"""What a rank tells the others of its completions: flat buffers, from which every rank makes the same batch."""

from __future__ import annotations

import pickle
import random
from array import array
from typing import Any

import torch

from megatron_rl.runtime.display import Display
from megatron_rl.trainer.exchange import flattened
from megatron_rl.trainer.rollouts import Generator, Response, experience
from megatron_rl.types import Completion, Prompt, Sampling, Score

NUM_PROMPTS, PER_PROMPT = 6, 4
# Two numbers of 32 bits for a token, and a little for each response.
MAX_BYTES_PER_TOKEN = 8.5


def completions(shortest: int = 100) -> list[list[Completion]]:
    draw = random.Random(3)

    def one() -> Completion:
        size = draw.randrange(shortest, shortest + 300)
        ids = [draw.randrange(150_000) for _ in range(size)]
        return Completion(ids, [-draw.random() for _ in range(size)], draw.random() < 0.3, draw.randrange(5))

    return [[one() for _ in range(PER_PROMPT)] for _ in range(NUM_PROMPTS)]


def num_tokens(groups: list[list[Completion]]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group)


class TwoRanks:
    """A world in which another rank leads the second replica, and everything travels as a pickle."""

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

    def generate(self, prompts: Any, sampling: Sampling, progress: Any = None) -> list[list[Completion]]:
        assert len(prompts) == len(self.mine)
        return self.mine


def test_no_object_for_a_token_travels():
    groups = completions()
    world = TwoRanks(groups[3:])
    generator = Generator(HalfEngine(groups[:3]), None, str, world, Display(shown=False))
    got = generator._generate([Prompt(f"p{i}", (1,), "", "") for i in range(NUM_PROMPTS)], Sampling(PER_PROMPT, 400), "test")
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
    for groups in ([], [[]], [[Completion((), (), True, -1)], [], [Completion((7,), (-0.5,), False, 9)]]):
        back = pickle.loads(pickle.dumps(flattened(groups))).groups()
        assert back == groups
        assert all(type(completion.truncated) is bool for group in back for completion in group)


def test_the_batch_is_that_of_plain_lists():
    groups, prompts = completions(1), [Prompt(f"p{i}", tuple(range(1, 3 + i)), "", "") for i in range(NUM_PROMPTS)]
    rows = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    responses = [[Response(prompts[i], completion, "", Score(0.0, False)) for completion in group] for i, group in enumerate(groups)]
    got = experience(responses, 0, 1, True)
    tokens = [token for prompt, completion in rows for token in (*prompt.token_ids, *completion.token_ids)]
    logprobs = [value for _, completion in rows for value in completion.sampler_logprobs]
    assert torch.equal(got.sequences.token_ids, torch.tensor(tokens))
    assert torch.equal(got.sampler_logprobs, torch.tensor(logprobs, dtype=torch.float32))
