"""Whether the rows of an optimizer step can be spread evenly over the data-parallel ranks."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_rl.config.rules.layout_rules import replica_ranks
from megatron_rl.config.schema import Config

IDLE_LIMIT = 0.15  # share of the ranks' time
_SPREAD = 0.9  # standard deviation of the logarithm of a response's length
_LONGEST = 4.0  # responses end at so many times the mean, as at a limit of 16k for a mean of 4k
_DRAWS = 3
_MOST_ROWS = 64  # a rank; beyond, nothing is idle


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


def idle_warning(config: Config, world_size: int) -> str | None:
    """A warning about ranks that will wait for each other; None where they will not."""
    batch = config.batch
    ranks = world_size // replica_ranks(config.parallel)
    rows = batch.prompts_per_minibatch * batch.responses_per_prompt
    if ranks < 2 or rows >= _MOST_ROWS * ranks:
        return None
    idle = idle_share(rows, ranks)
    if idle <= IDLE_LIMIT:
        return None
    enough = batch.prompts_per_minibatch
    while idle_share(enough * batch.responses_per_prompt, ranks) > IDLE_LIMIT:
        enough *= 2
    return (
        f"batch.prompts_per_minibatch = {batch.prompts_per_minibatch}: {rows} responses over"
        f" {ranks} data-parallel ranks are {rows / ranks:.1f} a rank, so that training will idle"
        f" some {100 * idle:.0f} % of its time (lengths with a long tail assumed); raise it to"
        f" {enough}, or give the ranks to parallel.context or parallel.tensor"
    )
