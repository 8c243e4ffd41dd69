"""What an environment appends is marked as not sampled, and its tokens are kept apart by turn."""

import math

import numpy as np

from megatron_rl.rollouts.environments.outcomes import appended, last_turn, turns_of
from megatron_rl.rollouts.store import joined
from megatron_rl.types import APPENDED, Completion, VersionSpan, num_appended

FIRST = Completion((9, 2), (-0.5, -0.25), False, 4)


def test_what_is_appended_was_sampled_by_no_weights() -> None:
    first = appended(FIRST, (7, 7))
    assert list(first.token_ids) == [9, 2, 7, 7]
    assert list(first.sampler_logprobs) == [-0.5, -0.25, 0, 0]
    assert first.spans == (VersionSpan(4, 2), VersionSpan(APPENDED, 4))
    assert num_appended(first.spans) == 2


def test_turns_are_what_was_sampled_between() -> None:
    second = joined(appended(FIRST, (7, 7)), Completion((5,), (-1.0,), False, 5))
    third = joined(second, Completion((6,), (-1.0,), True, 6))
    assert [list(turn) for turn in turns_of(third)] == [[9, 2], [5, 6]]
    assert last_turn(third) == [5, 6]
    assert last_turn(appended(FIRST, (7,))) == []
    assert third.spans[1] == VersionSpan(APPENDED, 4)


def test_what_was_not_drawn_keeps_the_whole_vocabulary() -> None:
    drawn = Completion((9, 2), (-0.5, -0.25), False, 4, kept=(9, 3, 2, -1))
    first = appended(drawn, (7,))
    assert list(first.kept or ()) == [9, 3, 2, -1, -1, -1]
    more = Completion((5,), (-1.0,), False, 4, kept=(5, 6))
    assert list(joined(first, more).kept or ()) == [9, 3, 2, -1, -1, -1, 5, 6]


def test_what_was_not_drawn_has_no_experts_yet() -> None:
    experts = np.array([[1], [2], [255]], np.uint8)  # of one token of the prompt and two drawn
    drawn = Completion((9, 2), (-0.5, -0.25), False, 4, experts=experts)
    found = appended(drawn, (7, 8)).experts
    assert found is not None and found[:, 0].tolist() == [1, 2, 255, 255, 255]


def test_what_was_not_drawn_has_no_likely_tokens() -> None:
    drawn = Completion((9,), (-0.5,), False, 4, likely=(9, 3), sampler_likely_logprobs=(-0.5, -1.0))
    found = appended(drawn, (7,))
    assert list(found.likely or ()) == [9, 3, -1, -1]
    assert list(found.sampler_likely_logprobs or ()) == [-0.5, -1.0, -math.inf, -math.inf]
