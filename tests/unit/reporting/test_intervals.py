"""Intervals of a mean: against a table of Student's t and by counted coverage."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from megatron_rl.reporting.intervals import Interval, student


def test_student_by_hand() -> None:
    # Mean 3, sample deviation sqrt(2.5), t(0.975, 4) = 2.776 from the table.
    half = 2.776445 * 2.5**0.5 / 5**0.5
    interval = student([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.low == pytest.approx(3.0 - half, rel=1e-6)
    assert interval.high == pytest.approx(3.0 + half, rel=1e-6)


def test_coverage_of_five_seeds() -> None:
    draws = np.random.default_rng(5).normal(0.0, 1.0, (300, 5)).tolist()
    by_student = np.mean([found.low <= 0 <= found.high for found in map(student, draws)])
    assert 0.91 < by_student < 0.98


def test_one_value_bounds_nothing_and_equal_ones_all() -> None:
    assert student([0.5]) == Interval(0.5, -inf, inf)
    assert student([0.5, 0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        student([])
