"""How sure a mean is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(values: Sequence[float], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """(low, high) of the mean: the (1 - level)/2 and (1 + level)/2 quantiles of the means of ``num_resamples`` samples of the same size
    drawn with replacement. ``values`` must be independent: one value a prompt (the mean over its responses), not one a response.

    Deterministic for a seed, and independent of numpy's global generator. One value gives an interval of no width.

    Raises:
        ValueError: no value.

    Source: Efron 1979, percentile method.
    """
    if not values:
        raise ValueError("a confidence interval needs at least one value")
    assert 0 < level < 1
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(sample.size, size=(num_resamples, sample.size))
    low, high = np.quantile(sample[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
