"""What an environment appends is marked as not sampled."""

import math

import numpy as np

from megatron_rl.rollouts.environment import APPENDED, SingleTurn, appended
from megatron_rl.types import Completion, Prompt, VersionSpan


def test_what_is_appended_was_sampled_by_no_weights() -> None:
    first = appended(Completion((9, 2), (-0.5, -0.25), False, 4), (7, 7))
    assert list(first.token_ids) == [9, 2, 7, 7]
    assert list(first.sampled or ()) == [True, True, False, False]
    assert first.spans == (VersionSpan(4, 2), VersionSpan(APPENDED, 4))
    assert list(appended(first, (8,)).sampled or ()) == [True, True, False, False, False]


def test_a_single_turn_is_complete_when_its_engine_ends_it() -> None:
    environment = SingleTurn()
    environment.start(Prompt("p", (1,), "2", "toy"), seed=3)
    assert environment.step((9, 2), seed=3) is None


def test_what_was_not_drawn_keeps_the_whole_vocabulary() -> None:
    drawn = Completion((9, 2), (-0.5, -0.25), False, 4, kept=(9, 3, 2, -1))
    assert list(appended(drawn, (7,)).kept or ()) == [9, 3, 2, -1, -1, -1]


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
