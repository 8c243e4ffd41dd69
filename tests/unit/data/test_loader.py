"""The stream of prompts: epochs, resume, independence of global random state."""

from __future__ import annotations

import random

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.types import Prompt


def prompts(count: int, answer: str = "1") -> list[Prompt]:
    return [Prompt(f"p:{index}", (index, 1), answer, "s") for index in range(count)]


def uids(taken: list[Prompt]) -> list[str]:
    return [prompt.uid for prompt in taken]


def test_without_shuffling_the_stream_wraps_around():
    loader = PromptLoader(prompts(3), seed=1, shuffle=False)
    assert uids(loader.take(2)) == ["p:0", "p:1"]
    assert uids(loader.take(5)) == ["p:2", "p:0", "p:1", "p:2", "p:0"]


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    stream = uids(PromptLoader(prompts(20), seed=1, shuffle=True).take(60))
    epochs = [stream[:20], stream[20:40], stream[40:]]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert uids(PromptLoader(prompts(20), seed=2, shuffle=True).take(20)) != epochs[0]


@pytest.mark.parametrize("before", [0, 3, 7, 14, 23])
def test_a_restored_stream_continues_exactly(before):
    whole = uids(PromptLoader(prompts(7), seed=5, shuffle=True).take(before + 30))
    first = PromptLoader(prompts(7), seed=5, shuffle=True)
    first.take(before)
    state = first.state()
    first.take(4)  # the state must not follow
    second = PromptLoader(prompts(7), seed=5, shuffle=True)
    second.take(2)
    second.restore(state)
    assert uids(second.take(30)) == whole[before:]


def test_global_random_state_is_not_used():
    random.seed(0)
    expected = uids(PromptLoader(prompts(9), seed=3, shuffle=True).take(20))
    random.seed(77)
    assert uids(PromptLoader(prompts(9), seed=3, shuffle=True).take(20)) == expected


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (lambda: PromptLoader(prompts(6), seed=1, shuffle=True), "prompts"),
        (lambda: PromptLoader(prompts(7, answer="2"), seed=1, shuffle=True), "prompts"),
        (lambda: PromptLoader(prompts(7), seed=2, shuffle=True), "seed"),
        (lambda: PromptLoader(prompts(7), seed=1, shuffle=False), "shuffle"),
    ],
)
def test_a_state_of_other_data_is_refused(other, key):
    state = PromptLoader(prompts(7), seed=1, shuffle=True).state()
    with pytest.raises(ValueError, match=rf"resume: .* with {key} ="):
        other().restore(state)


def test_no_prompt_is_an_error():
    with pytest.raises(ValueError, match=r"data\.train: no prompt"):
        PromptLoader([], seed=1, shuffle=True)
