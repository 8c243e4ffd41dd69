"""Confidence intervals of a mean over seeds or prompts, by Student's t.

They hold the mean 95 times in 100 for values that are about normal, and for many of any kind. The
bootstrap is no alternative: of five values it holds the mean about 84 times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy import stats

_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds that hold the true one with 95 %.

    Of a single value the bounds are infinite: one run says nothing about its spread.
    """

    mean: float
    low: float
    high: float


def welch(values: Sequence[float], others: Sequence[float]) -> Interval:
    """The interval of mean(values) - mean(others), drawn independently with variances of their own.

    Source: Welch 1947, The generalization of Student's problem.
    """
    mean = _mean(values) - _mean(others)
    if min(len(values), len(others)) < 2:
        return Interval(mean, -inf, inf)
    if not np.ptp(values) and not np.ptp(others):  # Welch's degrees of freedom would be 0 / 0
        return Interval(mean, mean, mean)
    low, high = stats.ttest_ind(values, others, equal_var=False).confidence_interval(_LEVEL)
    return Interval(mean, float(low), float(high))


def student(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean, for few values that are about normal.

    Raises:
        ValueError: no values.
    """
    mean = _mean(values)
    count = len(values)
    if count == 1:
        return Interval(mean, -inf, inf)
    error = float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) / sqrt(count)
    # Both tails together hold 5 %: the quantile of 0.975.
    half = float(stats.t.ppf((1 + _LEVEL) / 2, count - 1)) * error
    return Interval(mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    if not len(values):
        raise ValueError("an interval of no values: give at least one")
    return float(np.mean(np.asarray(values, dtype=np.float64)))
