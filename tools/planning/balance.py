"""Whether the rows of an optimizer step can be spread evenly over the data-parallel ranks."""

from __future__ import annotations

import heapq

import numpy as np

_SPREAD = 0.9  # standard deviation of the logarithm of a response's length
_LONGEST = 4.0  # responses end at so many times the mean, as at a limit of 16k for a mean of 4k
_DRAWS = 3


def idle_share(rows: int, ranks: int) -> float:
    """Expected share of the ranks' time in which they wait for the one with the most work.

    However rows are packed, a rank takes whole rows. Their work is drawn from a log-normal
    distribution with a long tail, and given, longest first, to the rank with the least. Example:
    ``idle_share(1024, 512)`` is near one half: the longest row alone has as much work as four of
    the mean, and there are two a rank.
    """
    shares = []
    for draw in range(_DRAWS):
        work = np.random.default_rng(draw).lognormal(0.0, _SPREAD, rows)
        mean = np.exp(_SPREAD**2 / 2)  # of that distribution
        work = np.minimum(work, _LONGEST * mean)
        work = np.sort(work)[::-1]
        loads = [0.0] * ranks  # a heap: the least is the first
        for row in work:
            heapq.heapreplace(loads, loads[0] + float(row))
        shares.append(1.0 - float(work.sum()) / ranks / max(loads))
    return float(np.mean(shares))
