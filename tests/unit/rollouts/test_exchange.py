"""Rows between ranks: flat buffers, and what of them travels while responses are sampled."""

from __future__ import annotations

import pickle
import random
from array import array
from typing import Any

import numpy as np
import torch

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.rows.exchange import (
    Route,
    exchange_rows,
    expert_rows,
    on_main,
    token_rows,
)
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.types import APPENDED, Completion, Prompt, Sampling, Score, VersionSpan
from tests.engines import Answering
from tests.unit.trainer.runs import WORLD, words
from tools.replay.read_bundle import response_tokens

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


class ListedEngine(Answering):
    """``groups[n]`` are the responses to prompt ``pn``."""

    def __init__(self, groups: list[list[Completion]]) -> None:
        super().__init__()
        self.groups = groups

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        return self.groups[int(prompt.uid[1:])][number]


class LengthIsReward:
    def score(self, prompts: Any, responses: list[str], truncated: Any) -> list[Score]:
        return [Score(float(len(text.split())), False) for text in responses]


def prompts() -> list[Prompt]:
    return [Prompt(f"p{i}", (1,), "", "") for i in range(NUM_PROMPTS)]


def test_a_completion_is_compact_by_itself():
    groups = completions()
    assert len(pickle.dumps(groups)) / num_tokens(groups) <= MAX_BYTES_PER_TOKEN
    first = groups[0][0]
    assert isinstance(first.token_ids, array) and first.token_ids.itemsize == 4
    assert isinstance(first.sampler_logprobs, array) and first.sampler_logprobs.itemsize == 4


def test_whole_responses_come_to_the_main_rank_in_the_order_that_is_asked_for():
    groups = completions(1)
    sampler = LaunchSampler(
        ListedEngine(groups), LengthIsReward(), words, WORLD, Display(shown=False)
    )
    responses = sampler.run(prompts(), Sampling(PER_PROMPT, 400), "test")
    chosen = on_main(responses, [5, 23, 0], words, WORLD)
    flat = [completion for group in groups for completion in group]
    assert [response.completion for response in chosen] == [flat[5], flat[23], flat[0]]
    assert [type(response.completion.truncated) for response in chosen] == [bool] * 3
    assert [response.prompt.uid for response in chosen] == ["p1", "p5", "p0"]
    assert chosen[1].text == words(flat[23].token_ids)
    assert chosen[1].score.reward == len(flat[23].token_ids)


def test_the_batch_is_that_of_plain_lists():
    groups = completions(1)
    tokens: list[int] = []
    responses: list[int] = []
    pairs = []
    for number, group in enumerate(groups):
        prompt = tuple(range(1, 3 + number))
        for completion in group:
            pairs.append((prompt, completion.token_ids))
            tokens += [*prompt, *completion.token_ids]
            responses += completion.token_ids
    got = sequence_batch(pairs)
    assert torch.equal(got.token_ids, torch.tensor(tokens))
    assert torch.equal(response_tokens(got), torch.tensor(responses))


def test_completions_become_rows():
    rows = token_rows(
        [6, 7, 8],
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
    spans = (VersionSpan(1, 1), VersionSpan(APPENDED, 2), VersionSpan(1, 3))
    appended = Completion((9, 2, 4), (-0.5, 0.0, -0.25), False, 1, spans)
    mixed = token_rows([0, 1], [appended, Completion((7,), (-1.0,), True, 2)], with_sampled=True)
    assert mixed.columns["sampled"].tolist() == [True, False, True, True]
    nothing = token_rows([], [])
    assert [values.dtype for values in nothing.columns.values()] == [np.int32, np.float32]


def test_experts_become_rows_of_prompt_and_response():
    """Two bytes a token; nothing is known of the second response."""
    given = np.array([[1, 2], [3, 0], [255, 255]], np.uint8)
    pair = [
        Completion((9, 2), (-0.5, -0.25), False, 1, experts=given),
        Completion((7,), (-1.0,), True, 2),
    ]
    rows = expert_rows([4, 6], pair, [Prompt("a", (1,), "", ""), Prompt("b", (1, 5), "", "")], 2)
    assert rows.rows.tolist() == [4, 6] and rows.lengths.tolist() == [3, 3]
    assert rows.columns["experts"].tolist() == [*given.tolist(), *[[255, 255]] * 3]
    nothing = expert_rows([], [], [], 2).columns["experts"]
    assert nothing.shape == (0, 2) and nothing.dtype == np.uint8


def test_one_rank_keeps_its_rows():
    rows = token_rows([0], [Completion((9, 2), (-0.5, -0.25), False, 1)])
    here = np.array([0])
    kept = exchange_rows(rows, Route(np.array([2]), here, here), World(0, 1, 0, "test"))
    assert kept.columns["token_ids"].tolist() == [9, 2]
