"""Seconds of a rollout: by hand, and against a loop over every decoding step."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.planning.rollout_time import (
    DecodeStep,
    engine_seconds,
    response_lengths,
    rollout_time,
)

STEP = DecodeStep(weight_bytes=6e9, token_bytes=1e6, memory_gb_s=1000.0)


def plain_seconds(lengths: list[int], slots: int, step: DecodeStep, prompt: int) -> float:
    """One decoding step after the other."""
    waiting = list(lengths)
    running: list[list[int]] = []  # tokens so far and to come
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([prompt, waiting.pop(0)])
        seconds += step.seconds(sum(have for have, _ in running))
        running = [[have + 1, left - 1] for have, left in running]
        running = [each for each in running if each[1] > 0]
    return seconds


def test_two_sequences_by_hand() -> None:
    # Three steps of both, with 20, 22 and 24 tokens; two of the longer, with 13 and 14.
    milliseconds = 5 * 6 + 0.001 * (20 + 22 + 24 + 13 + 14)
    assert engine_seconds([3, 5], 8, STEP, prompt=10) == pytest.approx(milliseconds / 1000)
    # One after the other: 10 to 12 tokens, then 10 to 14.
    milliseconds = 8 * 6 + 0.001 * (33 + 60)
    assert engine_seconds([3, 5], 1, STEP, prompt=10) == pytest.approx(milliseconds / 1000)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_as_step_by_step(slots: int) -> None:
    lengths = np.random.default_rng(slots).integers(1, 60, 40).tolist()
    want = plain_seconds(lengths, slots, STEP, prompt=7)
    assert engine_seconds(lengths, slots, STEP, prompt=7) == pytest.approx(want, rel=1e-9)


def test_engines_wait_for_the_longest() -> None:
    free = DecodeStep(weight_bytes=1e9, token_bytes=0.0, memory_gb_s=1.0)  # a second a step
    groups = [[4, 4], [2, 10], [1, 1], [3, 1]]
    found = rollout_time(groups, 2, 8, free, prompt=0)
    assert found.seconds == 10 and found.idle == pytest.approx(1 - (10 + 3) / 20)
    # More engines than prompts: two have nothing to do.
    found = rollout_time(groups[:2], 4, 8, free, prompt=0)
    assert found.seconds == 10 and found.idle == pytest.approx(1 - (4 + 10) / 40)


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths = response_lengths(200_000, median=500, p99=4000, limit=10**6)
    assert np.median(lengths) == pytest.approx(500, rel=0.02)
    assert np.quantile(lengths, 0.99) == pytest.approx(4000, rel=0.03)
    cut = response_lengths(1000, median=500, p99=4000, limit=600)
    assert cut.max() == 600 and (cut == response_lengths(1000, 500, 4000, 600)).all()
