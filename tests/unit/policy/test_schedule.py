"""The learning-rate schedule, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.schema import OptimConfig
from megatron_rl.policy.optimizer import learning_rate
from tests.numerics import policy_cases as cases


def optim(**more: Any) -> OptimConfig:
    return cases.optim(learning_rate=1.0, min_learning_rate=0.2, **more)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.88284271, 0.6, 0.31715729]),
    ],
)
def test_eight_steps_with_four_of_warm_up(schedule: str, expected: list[float]) -> None:
    rates = [learning_rate(step, optim(schedule=schedule, warmup_steps=4), 8) for step in range(8)]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_beyond_the_end_it_stays_at_the_minimum(schedule: str) -> None:
    assert learning_rate(50, optim(schedule=schedule), 8) == pytest.approx(0.2)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(0, optim(schedule="linear"), 8) == 1.0
