"""Responses that continue in the next step: tokens and versions by hand, carried and saved."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.rollouts.rows.exchange import token_versions
from megatron_rl.rollouts.store import (
    ResponseStore,
    cut,
    joined,
    saved_score,
)
from megatron_rl.scheduling.end_of_step import StepGroups
from megatron_rl.types import Completion, Score, VersionSpan

FIRST = Completion((5, 6), (-0.5, -0.25), truncated=False, weight_version=3)
MORE = Completion((7,), (-1.0,), truncated=True, weight_version=4)


def test_what_came_later_stands_behind_with_its_own_version() -> None:
    whole = joined(FIRST, MORE)
    assert list(whole.token_ids) == [5, 6, 7]
    assert list(whole.sampler_logprobs) == [-0.5, -0.25, -1.0]
    assert whole.spans == (VersionSpan(3, 2), VersionSpan(4, 3))
    assert token_versions([whole, FIRST]).tolist() == [3, 3, 4, 3, 3]
    assert (whole.truncated, whole.weight_version) == (True, 3)
    assert joined(None, MORE) is MORE


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (1, (VersionSpan(3, 1),)),
        (2, (VersionSpan(3, 2),)),
        (3, (VersionSpan(3, 2), VersionSpan(4, 3))),
    ],
)
def test_a_cut_response_has_its_first_tokens_and_has_not_ended(length, spans) -> None:
    shorter = cut(joined(FIRST, MORE), length)
    assert shorter.token_ids == array("i", [5, 6, 7][:length])
    assert shorter.sampler_logprobs == array("f", [-0.5, -0.25, -1.0][:length])
    assert shorter.spans == spans
    assert (shorter.truncated, shorter.weight_version) == (False, 3)


def test_what_was_carried_is_what_the_next_step_continues() -> None:
    store = ResponseStore()
    store.begin_step([((1, 0), FIRST)])
    assert store.held((1, 0)) == FIRST and store.held((1, 1)) is None
    store.put((1, 0), joined(FIRST, MORE))
    store.put((1, 1), Completion((8, 9), (-1.0, -2.0), False, 4))
    store.put((2, 0), MORE)
    # Response (1, 0) has ended within the level; (1, 1) has one token too many; group 2 is trained.
    carried = store.unfinished(StepGroups(3, [2], limits={1: 1, 2: 1}), ended={(1, 0)})
    assert dict(carried) == {
        (1, 0): joined(FIRST, MORE),
        (1, 1): Completion((8,), (-1.0,), False, 4),
    }
    # What the step has sampled of them: all of MORE, and one token.
    assert store.begin_step(carried) == len(MORE.token_ids) + 1
    store.forget([2])
    assert store.num_tokens == 4 and store.get((2, 0)) is None
    assert store.length((1, 1)) == 1 and store.length((1, 2)) == 0


def test_a_store_comes_back_bit_for_bit() -> None:
    store = ResponseStore()
    store.begin_step([((1, 0), joined(FIRST, MORE))])
    store.put((2, 1), Completion((), (), False, 4))
    other = ResponseStore()
    other.restore(store.state())
    assert other.places() == store.places()
    score = Score(1.5, True, {"accuracy": 1.0}, "7")
    assert Score(**saved_score(score)) == score


def test_kept_tokens_are_saved() -> None:
    store = ResponseStore()
    store.put((1, 0), Completion((5, 6), (-0.5, -0.25), False, 3, kept=(5, 9, 6, -1)))
    store.put((1, 1), FIRST)
    again = ResponseStore()
    again.restore(store.state())
    assert again.get((1, 0)) == store.get((1, 0))
    assert again.get((1, 1)) == FIRST and FIRST.kept is None


def with_experts(completion: Completion, *of_tokens: int) -> Completion:
    """One layer, one expert; the prompt has one token."""
    return replace(completion, experts=np.array(of_tokens, np.uint8)[:, None])


def experts(completion: Completion | None) -> list[int]:
    assert completion is not None and completion.experts is not None
    return completion.experts[:, 0].tolist()


def test_experts_are_those_of_the_weights_that_sampled() -> None:
    """Later ones are of all tokens again; the last token of a part has none before it continues."""
    first = with_experts(FIRST, 1, 2, 255)
    whole = joined(first, with_experts(MORE, 3, 3, 4, 255))
    assert experts(whole) == [1, 2, 4, 255]
    assert experts(cut(whole, 2)) == [1, 2, 255] and experts(whole) == [1, 2, 4, 255]
    assert experts(cut(whole, 3)) == [1, 2, 4, 255]
    assert experts(joined(None, first)) == [1, 2, 255]
    nothing_more = with_experts(Completion((), (), True, 4), 3, 3, 255)
    assert experts(joined(first, nothing_more)) == [1, 2, 255]
    store = ResponseStore()
    store.put((1, 0), first)
    again = ResponseStore()
    again.restore(store.state())
    assert experts(again.get((1, 0))) == [1, 2, 255]
