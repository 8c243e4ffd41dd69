"""Which rows go through which forward pass: balanced micro-batches under a token budget."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_rl.policy.batches.work_model import Integers, WorkModel

Item = tuple[int, int]  # cost, row
Bin = tuple[int, list[int]]  # cost, rows
Plan = list[list[list[int]]]  # data-parallel rank -> micro-batch -> rows
# Ranks are leveled until the slowest has at most this many times the mean work.
_LEVEL_ENOUGH = 1.005
_LIGHTEST_TRIED = 16
# A few bins are inserted one by one into a sorted list; more of them are sorted together with it.
_SORT_FROM_SHARE = 1 / 8


@dataclass(frozen=True)
class PlanRule:
    """The constraints of plans, equal on every process."""

    data_parallel_size: int
    tokens_per_microbatch: int  # the budget: most tokens (prompt + response) of one micro-batch
    multiple: int  # the number of micro-batches of a rank must be a multiple of this
    work: WorkModel  # what the ranks get equal shares of

    def __post_init__(self) -> None:
        assert self.data_parallel_size > 0 and self.multiple > 0


def plan_microbatches(lengths: Sequence[int], rows: Sequence[int], rule: PlanRule) -> Plan:
    """data-parallel rank -> micro-batch -> rows, a partition of ``rows``; equal on every process.

    Every rank gets the same number of micro-batches: the smallest multiple of ``multiple`` that was
    found to fit. Rows are spread by their work over all bins (ranks x micro-batches) by the largest
    differencing method; where that balance overruns the budget and best-fit decreasing stays within
    it, the latter is used. Bins then go to ranks, largest first, each to the rank with the least,
    and ranks exchange rows until their sums are level. A rank runs its largest micro-batch first,
    so an OOM happens on the first micro-batch or not at all.

    A micro-batch is empty only where there are fewer rows than bins.

    Args:
        lengths: tokens of each row, prompt and response.
        rows: rows to place, each once.

    Raises:
        ValueError: a row alone exceeds the budget.

    Source: Karmarkar and Karp 1982 (differencing), for several bins as in Michiels et al. 2003.
    """
    return plan_costs(rule.work.work(_integers(lengths)).tolist(), rows, lengths, rule)


def plan_costs(
    costs: Sequence[int], rows: Sequence[int], budgeted: Sequence[int], rule: PlanRule
) -> Plan:
    """``plan_microbatches`` for any cost of a row; ``budgeted``: what it takes of the budget."""
    plan = rough_plan(costs, rows, budgeted, rule)
    return _leveled(plan, _integers(costs), _integers(budgeted), rule.tokens_per_microbatch)


def rough_plan(
    costs: Sequence[int], rows: Sequence[int], budgeted: Sequence[int], rule: PlanRule
) -> Plan:
    """``plan_costs`` before ranks exchange rows."""
    assert len(set(rows)) == len(rows)
    require_fit(budgeted, rows, rule.tokens_per_microbatch)
    bins = _fitting_bins(
        _largest_first(costs, rows),
        _largest_first(budgeted, rows),
        rule.data_parallel_size * rule.multiple,
        rule.tokens_per_microbatch,
    )
    return _to_ranks(bins, rule.data_parallel_size)


def require_fit(lengths: Sequence[int], rows: Iterable[int], tokens_per_microbatch: int) -> None:
    """Raises ValueError for the first row that alone exceeds the budget."""
    for row in rows:
        if lengths[row] > tokens_per_microbatch:
            raise ValueError(
                f"batch.tokens_per_microbatch = {tokens_per_microbatch}: sequence {row} alone has"
                f" {lengths[row]} tokens; raise it to at least rollout.max_prompt_tokens +"
                " rollout.max_response_tokens"
            )


def _integers(values: Sequence[int]) -> Integers:
    return np.asarray(values, dtype=np.int64)


def _largest_first(costs: Sequence[int], rows: Iterable[int]) -> list[Item]:
    """Rows by falling cost; of equal cost the smaller row first."""
    chosen = np.fromiter(rows, dtype=np.int64)
    if not len(chosen):
        return []
    of_chosen = _integers(costs)[chosen]
    order = np.lexsort((chosen, -of_chosen))
    return list(zip(of_chosen[order].tolist(), chosen[order].tolist(), strict=True))


def _fitting_bins(items: list[Item], budgeted: list[Item], step: int, budget: int) -> list[Bin]:
    """The smallest number of bins found to fit, a multiple of ``step``."""
    tokens_of = {row: tokens for tokens, row in budgeted}
    # Two rows of more than half the budget never share a bin.
    large = sum(2 * tokens > budget for tokens, _ in budgeted)
    # -(-a // b) is a / b rounded up.
    lower = max(-(-sum(tokens_of.values()) // budget), large)
    num_bins = max(step, -(-lower // step) * step)
    tight: list[Bin] | None = None
    while True:
        # Balanced bins first: the slowest micro-batch is what all ranks wait for.
        balanced = largest_differencing(items, num_bins)
        if all(sum(map(tokens_of.__getitem__, rows)) <= budget for _, rows in balanced):
            return balanced
        # Differencing ignores the budget and may overrun it though a tighter packing fits.
        tight = tight or _best_fit_decreasing(budgeted, budget)
        if len(tight) <= num_bins:
            cost_of = {row: cost for cost, row in items}
            spread = _without_empty(tight, num_bins, tokens_of)
            return [(sum(map(cost_of.__getitem__, rows)), rows) for _, rows in spread]
        num_bins += step


def largest_differencing(items: Sequence[Item], num_bins: int) -> list[Bin]:
    """(cost, row) items in ``num_bins`` bins of nearly equal cost, largest bin first.

    Start with one partition per item, that item alone in a bin. Repeatedly merge the two partitions
    with the largest difference between their fullest and emptiest bin, the fullest bin of one with
    the emptiest of the other.
    """
    if num_bins == 1 or not items:
        everything = (sum(cost for cost, _ in items), sorted(row for _, row in items))
        return [everything, *[(0, []) for _ in range(num_bins - 1)]]
    # A bin is (-cost, first row, rows): ascending order is fullest first, and no two compare equal.
    # A partition lists its non-empty bins only. The second field breaks ties by age.
    heap = [(-cost, age, [(-cost, row, [row])]) for age, (cost, row) in enumerate(items)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        key, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        if len(first) + len(second) < num_bins:
            # Some bins stay empty, so the difference is the fullest bin, which ``first`` holds.
            # Order within does not matter yet; the shorter list is what gets copied.
            merged, shorter = (first, second) if len(first) >= len(second) else (second, first)
            merged += shorter
        else:
            merged = _merged(first, second, num_bins)
            # Costs are negative here: this is minus (fullest less emptiest), so the heap pops the
            # largest difference first.
            key = merged[0][0] - merged[-1][0]
        heapq.heappush(heap, (key, age, merged))
        age += 1
    filled = [(-cost, sorted(rows)) for cost, _, rows in sorted(heap[0][2])]
    return filled + [(0, []) for _ in range(num_bins - len(filled))]


def _merged(first: list, second: list, num_bins: int) -> list:
    """``num_bins`` bins, sorted, of two partitions that fill them; both are used up."""
    for bins in (first, second):
        if len(bins) < num_bins:  # full ones are sorted
            bins.sort()
    # So many bins of one have to share with one of the other.
    overlap = len(first) + len(second) - num_bins
    cut_first = len(first) - overlap
    cut_second = len(second) - overlap
    # The fullest of one meets the emptiest of the other; what would meet an empty bin stays alone.
    joined = [
        (cost + other, row, rows + others)
        for (cost, row, rows), (other, _, others) in zip(
            first[cut_first:], reversed(second[cut_second:]), strict=True
        )
    ]
    del first[cut_first:], second[cut_second:]
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    shorter += joined
    # Most merges bring one item to a full partition: inserting keeps them from costing num_bins.
    if len(shorter) < _SORT_FROM_SHARE * len(longer):
        for filled in shorter:
            insort(longer, filled)
        return longer
    longer += shorter
    longer.sort()
    return longer


def _best_fit_decreasing(items: list[Item], budget: int) -> list[Bin]:
    """Items, largest first, each into the fullest bin that still has room for it."""
    bins: list[Bin] = []
    # Free tokens of bins, ascending, and which bins these are.
    free: list[int] = []
    owners: list[int] = []
    for tokens, row in items:
        # The least room that is enough; without any, a new bin, whose room is the most of all and
        # so stands last.
        place = bisect_left(free, tokens)
        if place == len(free):
            bins.append((0, []))
            free.append(budget)
            owners.append(len(bins) - 1)
        left = free.pop(place) - tokens
        owner = owners.pop(place)
        bins[owner][1].append(row)
        bins[owner] = (bins[owner][0] + tokens, bins[owner][1])
        place = bisect_left(free, left)
        free.insert(place, left)
        owners.insert(place, owner)
    return sorted(bins, key=lambda filled: (-filled[0], filled[1]))


def _without_empty(bins: list[Bin], num_bins: int, tokens_of: dict[int, int]) -> list[Bin]:
    """``num_bins`` bins, none empty while another holds two rows: the fullest such bin is cut in
    about half."""
    # By number: the heap refers to bins, and one that is cut becomes two with new numbers.
    numbered = dict(enumerate(bins))
    next_number = len(bins)
    # Of equally full ones the bin whose first row is largest.
    divisible = [
        (-tokens, -rows[0], number) for number, (tokens, rows) in numbered.items() if len(rows) > 1
    ]
    heapq.heapify(divisible)
    while len(numbered) < num_bins and divisible:
        tokens, rows = numbered.pop(heapq.heappop(divisible)[2])
        moved_tokens = moved = 0
        while moved < len(rows) - 1 and (moved == 0 or 2 * moved_tokens < tokens):
            moved_tokens += tokens_of[rows[moved]]
            moved += 1
        halves = ((moved_tokens, rows[:moved]), (tokens - moved_tokens, rows[moved:]))
        for half_tokens, half_rows in halves:
            numbered[next_number] = (half_tokens, half_rows)
            if len(half_rows) > 1:
                heapq.heappush(divisible, (-half_tokens, -half_rows[0], next_number))
            next_number += 1
    return [*numbered.values(), *[(0, []) for _ in range(num_bins - len(numbered))]]


def _to_ranks(bins: list[Bin], ranks: int) -> Plan:
    """Equally many bins a rank: largest first, each to the rank with the least so far."""
    per_rank = len(bins) // ranks
    plan: Plan = [[] for _ in range(ranks)]
    # (cost, bins, rank), a heap from the start: its head is the least loaded rank with room.
    loads = [(0, 0, rank) for rank in range(ranks)]
    for cost, rows in sorted(bins, key=lambda filled: -filled[0]):
        load, count, rank = loads[0]
        plan[rank].append(rows)
        if count + 1 < per_rank:
            heapq.heapreplace(loads, (load + cost, count + 1, rank))
        else:
            # The rank has all of its bins.
            heapq.heappop(loads)
    return plan


def _leveled(plan: Plan, costs: Integers, tokens: Integers, budget: int) -> Plan:
    """``plan`` after exchanges of rows between the slowest rank and the fastest ones.

    Each exchange lowers the larger cost of the two ranks, keeps the budget, and empties no
    micro-batch. It ends where the slowest rank is close to the mean, or nothing helps it.
    """
    plan = [[list(rows) for rows in rank] for rank in plan]
    loads = np.array([sum(int(costs[rows].sum()) for rows in rank if rows) for rank in plan])
    enough = _LEVEL_ENOUGH * loads.mean()
    while loads.max() > enough:
        slowest = int(loads.argmax())
        for fastest in loads.argsort(kind="stable")[:_LIGHTEST_TRIED].tolist():
            gap = int(loads[slowest] - loads[fastest])
            moved = _exchange(plan[slowest], plan[fastest], gap, costs, tokens, budget)
            if moved:
                loads[slowest] -= moved
                loads[fastest] += moved
                break
        else:
            break

    # The largest first.
    return [
        sorted(map(sorted, rank), key=lambda rows: (-tokens[rows].sum(), rows)) for rank in plan
    ]


def _exchange(
    slow: list[list[int]],
    fast: list[list[int]],
    gap: int,
    costs: Integers,
    tokens: Integers,
    budget: int,
) -> int:
    """Moves one row from a rank's micro-batches to another's, for one of its rows or for nothing;
    of all such exchanges the one that halves ``gap`` best. Returns the cost that was moved, 0 where
    no exchange helps."""
    given, given_from = _placed(slow)
    taken, taken_from = _placed(fast)
    tokens_given = tokens[given]
    tokens_taken = tokens[taken]
    # Sums of integers in float64 are exact at these sizes.
    room_of_slow = budget - np.bincount(given_from, tokens_given, len(slow))
    room_of_fast = budget - np.bincount(taken_from, tokens_taken, len(fast))
    alone = np.bincount(given_from)[given_from] == 1
    # After the rows of the fast rank stand its micro-batches, which may give nothing.
    num_taken = len(taken)
    into = np.concatenate([taken_from, np.arange(len(fast))])
    nothing = np.zeros(len(fast), dtype=np.int64)
    # [rows of slow, rows and micro-batches of fast]: the cost that leaves the slow rank, and the
    # tokens that come to the fast one.
    moved = costs[given][:, None] - np.concatenate([costs[taken], nothing])
    growth = tokens_given[:, None] - np.concatenate([tokens_taken, nothing])
    # Where ``moved`` is between 0 and the gap, the larger of the two costs falls.
    allowed = (
        (moved > 0)
        & (moved < gap)
        & (growth <= room_of_fast[into])
        & (-growth <= room_of_slow[given_from][:, None])
    )
    # A row that is alone would leave an empty micro-batch if nothing came back.
    allowed[alone, num_taken:] = False
    if not allowed.any():
        return 0
    # One rank loses ``moved``, the other gains it: the gap changes by twice as much.
    unevenness = np.where(allowed, np.abs(2 * moved - gap), np.iinfo(np.int64).max)
    row, other = divmod(int(unevenness.argmin()), len(into))
    slow[given_from[row]].remove(given[row])
    fast[into[other]].append(int(given[row]))
    if other < num_taken:
        fast[into[other]].remove(taken[other])
        slow[given_from[row]].append(int(taken[other]))
    return int(moved[row, other])


def _placed(microbatches: list[list[int]]) -> tuple[Integers, Integers]:
    """All rows, and the micro-batch of each."""
    rows = np.array(list(chain.from_iterable(microbatches)), dtype=np.int64)
    return rows, np.repeat(np.arange(len(microbatches)), [len(rows) for rows in microbatches])
