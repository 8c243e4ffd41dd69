"""Micro-batch plans the plain way, in the words of ``rough_plan``: lists that are sorted and
searched anew at every step. What the package computes must be equal to this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.policy.batches.work_model import WorkModel

BY_TOKENS = WorkModel(2**62)  # attention costs nothing


class Bin(NamedTuple):
    cost: int
    rows: list[int]


def plan(
    costs: Sequence[int],
    rows: Sequence[int],
    *,
    data_parallel_size: int,
    tokens_per_microbatch: int,
    multiple: int,
    budgeted: Sequence[int],
) -> list[list[list[int]]]:
    step = data_parallel_size * multiple
    tokens = sum(budgeted[row] for row in rows)
    num_bins = max(step, -(-tokens // (tokens_per_microbatch * step)) * step)
    tight = best_fit_decreasing(budgeted, rows, tokens_per_microbatch)
    while True:
        balanced = differencing(costs, rows, num_bins)
        if all(sum(budgeted[row] for row in bin.rows) <= tokens_per_microbatch for bin in balanced):
            return to_ranks(balanced, data_parallel_size)
        if len(tight) <= num_bins:
            filled = without_empty(tight, num_bins, budgeted)
            with_costs = [Bin(sum(costs[row] for row in bin.rows), bin.rows) for bin in filled]
            return to_ranks(with_costs, data_parallel_size)
        num_bins += step


def differencing(costs: Sequence[int], rows: Sequence[int], num_bins: int) -> list[Bin]:
    """All partitions have all bins here, empty ones too, and are searched for the most uneven."""
    if num_bins == 1 or not rows:
        everything = Bin(sum(costs[row] for row in rows), sorted(rows))
        return [everything] + [Bin(0, []) for _ in range(num_bins - 1)]
    by_cost = sorted(rows, key=lambda row: (-costs[row], row))
    empty = [Bin(0, [])] * (num_bins - 1)
    partitions = [[Bin(costs[row], [row]), *empty] for row in by_cost]
    while len(partitions) > 1:
        # ``max`` takes the first of equal ones, and a new partition goes to the end.
        first = max(partitions, key=unevenness)
        partitions.remove(first)
        second = max(partitions, key=unevenness)
        partitions.remove(second)
        merged = [
            Bin(full.cost + light.cost, full.rows + light.rows)
            for full, light in zip(first, reversed(second), strict=True)
        ]
        partitions.append(sorted(merged, key=fullest_first))
    return [Bin(cost, sorted(members)) for cost, members in partitions[0]]


def unevenness(partition: list[Bin]) -> int:
    return partition[0].cost - partition[-1].cost


def fullest_first(bin: Bin) -> tuple:
    return (not bin.rows, -bin.cost, bin.rows[:1])


def best_fit_decreasing(budgeted: Sequence[int], rows: Sequence[int], budget: int) -> list[Bin]:
    bins: list[Bin] = []
    latest: list[int] = []  # places in ``bins``, the one that was filled last at the end
    for row in sorted(rows, key=lambda row: (-budgeted[row], row)):
        fitting = [place for place in latest if bins[place].cost + budgeted[row] <= budget]
        if fitting:
            # The fullest; of equal ones that which was filled last.
            place = max(reversed(fitting), key=lambda place: bins[place].cost)
            latest.remove(place)
        else:
            place = len(bins)
            bins.append(Bin(0, []))
        bins[place] = Bin(bins[place].cost + budgeted[row], [*bins[place].rows, row])
        latest.append(place)
    return sorted(bins, key=lambda bin: (-bin.cost, bin.rows))


def without_empty(bins: list[Bin], num_bins: int, budgeted: Sequence[int]) -> list[Bin]:
    bins = list(bins)
    while len(bins) < num_bins:
        divisible = [bin for bin in bins if len(bin.rows) > 1]
        if not divisible:
            return bins + [Bin(0, []) for _ in range(num_bins - len(bins))]
        fullest = max(divisible)
        bins.remove(fullest)
        moved = 1
        while moved < len(fullest.rows) - 1 and (
            2 * sum(budgeted[row] for row in fullest.rows[:moved]) < fullest.cost
        ):
            moved += 1
        for half in (fullest.rows[:moved], fullest.rows[moved:]):
            bins.append(Bin(sum(budgeted[row] for row in half), half))
    return bins


def to_ranks(bins: list[Bin], ranks: int) -> list[list[list[int]]]:
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for bin in sorted(bins, key=lambda bin: -bin.cost):
        open_ranks = [rank for rank in range(ranks) if len(result[rank]) < len(bins) // ranks]
        rank = min(open_ranks, key=lambda rank: (loads[rank], len(result[rank]), rank))
        loads[rank] += bin.cost
        result[rank].append(bin.rows)
    return result
