"""Which rows go through which forward pass: balanced micro-batches under a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

Item = tuple[int, int]  # tokens, row
Bin = tuple[int, list[int]]  # tokens, rows


def plan_microbatches(
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    data_parallel_size: int,
    tokens_per_microbatch: int,
    multiple: int,
    budgeted: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """data-parallel rank -> micro-batch -> rows, a partition of ``rows``; the same on every process.

    Every rank gets the same number of micro-batches: the smallest multiple of ``multiple`` that was found to fit. Rows are
    spread over all bins (ranks x micro-batches) by the largest differencing method; where that balance overruns the budget and
    best-fit decreasing stays within it, the latter is used. Bins then go to ranks, largest first, each to the rank with the
    fewest tokens. A rank runs its largest micro-batch first, so that memory runs out at once or never.

    Args:
        lengths: tokens of each row, prompt and response.
        rows: rows to place, each once.
        tokens_per_microbatch: most tokens of one micro-batch.
        multiple: number of micro-batches per rank must be a multiple of this.
        budgeted: what each row takes of the budget where that is not its length; balance goes by ``lengths`` all the same.

    A micro-batch is empty only where there are fewer rows than bins.

    Raises:
        ValueError: a row alone exceeds the budget.

    Source: Karmarkar and Karp 1982 (differencing), for several bins as in Michiels et al. 2003.
    """
    assert data_parallel_size > 0 and multiple > 0 and len(set(rows)) == len(rows)
    budgeted = lengths if budgeted is None else budgeted
    require_fit(budgeted, rows, tokens_per_microbatch)
    items, takes = _longest_first(lengths, rows), _longest_first(budgeted, rows)
    bins = _fitting_bins(items, takes, data_parallel_size * multiple, tokens_per_microbatch)
    return _to_ranks(bins, data_parallel_size)


def require_fit(lengths: Sequence[int], rows: Iterable[int], tokens_per_microbatch: int) -> None:
    """Raises ValueError for the first row that alone exceeds the budget."""
    for row in rows:
        if lengths[row] > tokens_per_microbatch:
            raise ValueError(
                f"batch.tokens_per_microbatch = {tokens_per_microbatch}: sequence {row} alone has {lengths[row]} tokens; "
                "raise it to at least rollout.max_prompt_tokens + rollout.max_response_tokens"
            )


def _longest_first(lengths: Sequence[int], rows: Iterable[int]) -> list[Item]:
    return sorted(((lengths[row], row) for row in rows), key=lambda item: (-item[0], item[1]))


def _fitting_bins(items: list[Item], budgeted: list[Item], step: int, budget: int) -> list[Bin]:
    """The smallest number of bins found to fit, a multiple of ``step``."""
    greedy, takes = _best_fit_decreasing(budgeted, budget), {row: tokens for tokens, row in budgeted}
    lower = -(-sum(takes.values()) // budget)
    num_bins = max(step, -(-lower // step) * step)
    while True:
        balanced = largest_differencing(items, num_bins)
        if all(sum(takes[row] for row in members) <= budget for _, members in balanced):
            return balanced
        if len(greedy) <= num_bins:
            lengths = {row: length for length, row in items}
            full = _without_empty(greedy, num_bins, takes)
            return [(sum(lengths[row] for row in members), members) for _, members in full]
        num_bins += step


def largest_differencing(items: Sequence[Item], num_bins: int) -> list[Bin]:
    """(length, row) items in ``num_bins`` bins of nearly equal length, largest bin first.

    Start with one partition per item, that item alone in a bin. Repeatedly merge the two partitions with the largest difference
    between their fullest and emptiest bin, the fullest bin of one with the emptiest of the other.
    """
    # A partition lists its non-empty bins only, fullest first; the second heap field breaks ties by age.
    heap = [(-length, order, [(length, [row])]) for order, (length, row) in enumerate(items)]
    if num_bins == 1 or not heap:
        return [(sum(length for length, _ in items), sorted(row for _, row in items)), *[(0, [])] * (num_bins - 1)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        overlap = max(0, len(first) + len(second) - num_bins)
        cut_1, cut_2 = len(first) - overlap, len(second) - overlap
        # The fullest of one meets the emptiest of the other; those that would meet an empty bin stay alone.
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first[cut_1:], reversed(second[cut_2:]), strict=True)]
        merged = sorted([*first[:cut_1], *second[:cut_2], *joined], key=lambda part: (-part[0], part[1][0]))
        smallest = merged[-1][0] if len(merged) == num_bins else 0
        heapq.heappush(heap, (smallest - merged[0][0], age, merged))
        age += 1
    filled = [(length, sorted(members)) for length, members in heap[0][2]]
    return filled + [(0, []) for _ in range(num_bins - len(filled))]


def _best_fit_decreasing(items: list[Item], budget: int) -> list[Bin]:
    """Items, longest first, each into the fullest bin that still has room for it."""
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for length, row in items:
        at = _first_at_least(room, length)
        if at == len(room):
            bins.append((0, []))
            room.append((budget, len(bins) - 1))
        free, index = room.pop(at)
        bins[index] = (bins[index][0] + length, [*bins[index][1], row])
        room.insert(_first_at_least(room, free - length), (free - length, index))
    return sorted(bins, key=lambda part: (-part[0], part[1]))


def _first_at_least(room: list[tuple[int, int]], tokens: int) -> int:
    low, high = 0, len(room)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if room[middle][0] < tokens else (low, middle)
    return low


def _without_empty(bins: list[Bin], num_bins: int, length_of: Mapping[int, int]) -> list[Bin]:
    """``num_bins`` bins, none empty while another holds two rows: the fullest such bin is cut in about half."""
    bins = list(bins)
    while len(bins) < num_bins:
        divisible = [part for part in bins if len(part[1]) > 1]
        if not divisible:
            return bins + [(0, []) for _ in range(num_bins - len(bins))]
        fullest = max(divisible, key=lambda part: (part[0], part[1]))
        bins.remove(fullest)
        tokens, moved = 0, 0
        while moved < len(fullest[1]) - 1 and (moved == 0 or 2 * tokens < fullest[0]):
            tokens += length_of[fullest[1][moved]]
            moved += 1
        bins += [(tokens, fullest[1][:moved]), (fullest[0] - tokens, fullest[1][moved:])]
    return bins


def _to_ranks(bins: list[Bin], ranks: int) -> list[list[list[int]]]:
    per_rank = len(bins) // ranks
    loads, plan = [0] * ranks, [[] for _ in range(ranks)]
    for length, members in sorted(bins, key=lambda part: -part[0]):
        rank = min((r for r in range(ranks) if len(plan[r]) < per_rank), key=lambda r: (loads[r], len(plan[r]), r))
        loads[rank] += length
        plan[rank].append(members)
    return plan
