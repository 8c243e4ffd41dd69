"""The rounds of a schedule: bounded, complete, and as large as they say."""

from __future__ import annotations

import pytest

from megatron_rl.weight_sync.planner.schedule import Stream, schedule
from tools.planning.plan_figures import buckets, direct, peak_staging_bytes


def test_schedule_bounds_every_round_and_loses_no_byte() -> None:
    """Four processes, all pairs, 100 bytes a pair, buckets of 48: no process sends or receives more
    than 48 bytes in a round."""
    streams = {Stream(a, b, "uint8"): 100 for a in range(4) for b in range(4) if a != b}
    result = schedule(direct(streams), 50, rounds_in_flight=2)
    per_round: dict[tuple[str, int, int], int] = {}
    for bucket in buckets(result):
        source, target, _ = bucket.stream
        for side in (("send", source, bucket.round), ("receive", target, bucket.round)):
            per_round[side] = per_round[side] + bucket.size if side in per_round else bucket.size
    assert max(per_round.values()) <= 48 and max(peak_staging_bytes(result).values()) <= 4 * 48
    for stream, total in streams.items():
        spans = sorted((b.begin, b.begin + b.size) for b in buckets(result) if b.stream == stream)
        assert [a for a, _ in spans] == [0, *[b for _, b in spans[:-1]]] and spans[-1][1] == total


@pytest.mark.parametrize(("rounds_in_flight", "peak"), [(1, 48), (2, 96), (3, 100)])
def test_peak_staging_counts_the_rounds_in_flight(rounds_in_flight: int, peak: int) -> None:
    """100 bytes in rounds of 48, 48 and 4."""
    result = schedule(direct({Stream(0, 1, "uint8"): 100}), 48, rounds_in_flight)
    assert result.rounds == 3 and peak_staging_bytes(result) == {0: peak, 1: peak}


@pytest.mark.parametrize(("size", "flights"), [(15, 1), (64, 0)])
def test_schedule_refuses_sizes_that_cannot_work(size: int, flights: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes={size}, rounds_in_flight={flights}"):
        schedule(direct({}), size, flights)
