"""Intervals of a mean: against enumeration, a table of Student's t and counted coverage."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from megatron_rl.reporting.intervals import Interval, bootstrap, student


def test_bootstrap_has_the_quantiles_of_all_resamples() -> None:
    values = [0.10, 0.30, 0.35, 0.70, 0.90]
    means = np.array([np.mean(drawn) for drawn in product(values, repeat=5)])  # all 3,125
    low, high = np.quantile(means, [0.025, 0.975])

    interval = bootstrap(values)

    assert interval.mean == pytest.approx(0.47)
    # 10,000 draws: the standard error of a 2.5 % quantile of these means is about 0.004
    assert interval.low == pytest.approx(low, abs=0.015)
    assert interval.high == pytest.approx(high, abs=0.015)


def test_bootstrap_of_many_values_is_the_normal_interval() -> None:
    values = np.random.default_rng(3).normal(1.0, 2.0, 4000).tolist()
    half = 1.96 * np.std(values) / np.sqrt(4000)
    interval = bootstrap(values)
    assert interval.low == pytest.approx(np.mean(values) - half, abs=0.05 * half)
    assert interval.high == pytest.approx(np.mean(values) + half, abs=0.05 * half)


def test_student_by_hand() -> None:
    # Mean 3, sample deviation sqrt(2.5), t(0.975, 4) = 2.776 from the table.
    half = 2.776445 * 2.5**0.5 / 5**0.5
    interval = student([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.low == pytest.approx(3.0 - half, rel=1e-6)
    assert interval.high == pytest.approx(3.0 + half, rel=1e-6)


def test_coverage_of_five_seeds() -> None:
    """Why the page gives both."""
    draws = np.random.default_rng(5).normal(0.0, 1.0, (300, 5)).tolist()
    by_student = np.mean([not student(values).excludes(0.0) for values in draws])
    by_bootstrap = np.mean([not bootstrap(values).excludes(0.0) for values in draws])
    assert 0.91 < by_student < 0.98
    assert 0.78 < by_bootstrap < 0.89


@pytest.mark.parametrize("interval", [bootstrap, student])
def test_one_value_bounds_nothing_and_equal_ones_all(interval) -> None:
    assert interval([0.5]) == Interval(0.5, -inf, inf)
    assert interval([0.5, 0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_the_same_values_give_the_same_bounds() -> None:
    assert bootstrap([0.1, 0.4, 0.2]) == bootstrap([0.1, 0.4, 0.2])
