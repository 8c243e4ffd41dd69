"""Seconds of a rollout: by hand, and against a loop over every decoding step."""

from __future__ import annotations

import numpy as np
import pytest

from tools.planning.rollout_time import Engines, least_decode_step, one_step, response_lengths
from tools.planning.simulated_fleet import DecodeStep

SECOND = DecodeStep(1.0)  # a step, whatever runs


def milliseconds(lengths: list[int], slots: int, prompt: int) -> float:
    """On one engine: 6 ms of weights and 1 us for every token."""
    step = least_decode_step(6e9, 1e6, memory_gb_s=1000.0, prompt_tokens=prompt)
    return 1000 * one_step(np.array([lengths]), Engines(1, slots, step)).seconds


def plain_milliseconds(lengths: list[int], slots: int, prompt: int) -> float:
    """One decoding step after the other."""
    waiting = list(lengths)
    running: list[list[int]] = []  # tokens so far and to come
    total = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([prompt, waiting.pop(0)])
        total += 6 + 0.001 * sum(have for have, _ in running)
        running = [[have + 1, left - 1] for have, left in running]
        running = [each for each in running if each[1] > 0]
    return total


def test_two_sequences_by_hand() -> None:
    # Three steps of both, with 20, 22 and 24 tokens; two of the longer, with 13 and 14.
    want = 5 * 6 + 0.001 * (20 + 22 + 24 + 13 + 14)
    assert milliseconds([3, 5], 8, prompt=10) == pytest.approx(want)
    # One after the other: 10 to 12 tokens, then 10 to 14.
    want = 8 * 6 + 0.001 * (33 + 60)
    assert milliseconds([3, 5], 1, prompt=10) == pytest.approx(want)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_as_step_by_step(slots: int) -> None:
    lengths = np.random.default_rng(slots).integers(1, 60, 40).tolist()
    want = plain_milliseconds(lengths, slots, prompt=7)
    assert milliseconds(lengths, slots, prompt=7) == pytest.approx(want, rel=1e-9)


def test_engines_share_one_queue_and_wait_for_the_longest() -> None:
    """Two engines of one slot: 4 and 10 begin, 3 and 2 follow the 4. In fixed shares of the prompts
    the first engine would have 4 and 10 alone, 14 s."""
    found = one_step(np.array([[4, 10], [3, 2]]), Engines(2, 1, SECOND))
    assert found.seconds == pytest.approx(10)
    assert found.idle == pytest.approx(1 - (4 + 3 + 2 + 10) / 20)
    # More engines than responses: two have nothing to do.
    found = one_step(np.array([[4, 10]]), Engines(4, 1, SECOND))
    assert found.seconds == pytest.approx(10)
    assert found.idle == pytest.approx(1 - 14 / 40)


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths = response_lengths(200_000, median=500, p99=4000, limit=10**6)
    assert np.median(lengths) == pytest.approx(500, rel=0.02)
    assert np.quantile(lengths, 0.99) == pytest.approx(4000, rel=0.03)
    cut = response_lengths(1000, median=500, p99=4000, limit=600)
    assert cut.max() == 600 and (cut == response_lengths(1000, 500, 4000, 600)).all()
