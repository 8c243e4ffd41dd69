"""The stream of prompts: epochs, resume, independence of global random state."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.types import Prompt


def prompts(count: int, answer: str = "1") -> list[Prompt]:
    return [Prompt(f"p:{index}", (index, 1), answer, "s") for index in range(count)]


def uids(taken: list[Prompt]) -> list[str]:
    """Without the mark of a prompt that came before in the same portion."""
    return [prompt.uid.partition("#")[0] for prompt in taken]


def test_without_shuffling_the_stream_wraps_around():
    loader = PromptLoader(prompts(3), seed=1, shuffle=False)
    assert uids(loader.take(2)) == ["p:0", "p:1"]
    assert uids(loader.take(5)) == ["p:2", "p:0", "p:1", "p:2", "p:0"]


def test_a_prompt_that_comes_again_in_one_portion_has_a_name_of_its_own():
    """The engine draws by the uid: two groups under one name would be the same responses."""
    loader = PromptLoader(prompts(2), seed=1, shuffle=False)
    assert [prompt.uid for prompt in loader.take(5)] == ["p:0", "p:1", "p:0#2", "p:1#2", "p:0#3"]
    assert [prompt.uid for prompt in loader.take(2)] == ["p:1", "p:0"]
    mixed = WeightedLoader([named("a", 1), named("b", 1)], [2.0, 1.0], seed=1, shuffle=True)
    assert [prompt.uid for prompt in mixed.take(6)] == [
        "a:0",
        "b:0",
        "a:0#2",
        "a:0#3",
        "b:0#2",
        "a:0#4",
    ]
    assert len({prompt.token_ids for prompt in loader.take(4)}) == 2


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    stream = uids(PromptLoader(prompts(20), seed=1, shuffle=True).take(60))
    epochs = [stream[:20], stream[20:40], stream[40:]]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert uids(PromptLoader(prompts(20), seed=2, shuffle=True).take(20)) != epochs[0]


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


def named(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}:{index}", (index, 1), "1", name) for index in range(count)]


def mixture(weights=(3.0, 1.0), sizes=(5, 7), seed=1) -> WeightedLoader:
    sources = [named("abc"[number], size) for number, size in enumerate(sizes)]
    return WeightedLoader(sources, weights, seed=seed, shuffle=True)


def test_shares_are_exact_and_a_small_source_is_passed_over_again():
    taken = mixture().take(80)
    assert "".join(prompt.data_source for prompt in taken[:8]) == "aabaaaba"
    mine = [prompt.uid.partition("#")[0] for prompt in taken if prompt.data_source == "a"]
    assert len(mine) == 60
    assert all(sorted(mine[start : start + 5]) == sorted(mine[:5]) for start in range(0, 60, 5)), (
        "whole epochs of its own"
    )


@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=5), count=st.integers(1, 200))
def test_no_source_is_a_whole_prompt_ahead_of_its_share(weights, count):
    sources = [named(str(number), 3) for number in range(len(weights))]
    loader = WeightedLoader(sources, [float(weight) for weight in weights], seed=1, shuffle=True)
    taken = [prompt.data_source for prompt in loader.take(count)]
    for number, weight in enumerate(weights):
        share = weight / sum(weights) * count
        assert taken.count(str(number)) < share + 1
        assert taken.count(str(number)) > share - len(weights)


def stream() -> PromptLoader:
    return PromptLoader(prompts(7), seed=5, shuffle=True)


@pytest.mark.parametrize(
    ("make", "before"),
    [*((stream, before) for before in (0, 3, 7, 14, 23))]
    + [*((mixture, before) for before in (0, 1, 9, 40))],
)
def test_a_restored_stream_or_mixture_continues_exactly(make, before):
    whole = uids(make().take(before + 50))
    first = make()
    first.take(before)
    state = first.state()
    first.take(7)  # the state must not follow
    second = make()
    second.take(3)
    second.restore(state)
    assert uids(second.take(50)) == whole[before:]


def test_a_mixture_depends_on_the_seed_and_not_on_portions():
    loader = mixture()
    assert uids(loader.take(3)) + uids(loader.take(9)) == uids(mixture().take(12))
    assert uids(mixture(seed=2).take(20)) != uids(mixture().take(20))


def test_states_of_other_weights_or_of_one_stream_are_refused():
    with pytest.raises(
        ValueError,
        match=r"resume: .*data\.train_weights = \[3\.0, 1\.0\], this run has \[1\.0, 1\.0\]",
    ):
        mixture(weights=(1.0, 1.0)).restore(mixture().state())
    with pytest.raises(ValueError, match=r"resume: .*data\.train_weights = None"):
        mixture().restore(PromptLoader(prompts(5), seed=1, shuffle=True).state())
    with pytest.raises(ValueError, match=r"resume: .* with prompts = None"):
        PromptLoader(prompts(5), seed=1, shuffle=True).restore(mixture().state())
    with pytest.raises(ValueError, match=r"no prompt of entry 2 is left"):
        WeightedLoader([prompts(1), []], (1.0, 1.0), seed=1, shuffle=True)
