"""When each bucket travels: rounds in which no process sends, or receives, more than one bucket of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

Stream = tuple[int, int, str]  # (source, destination, dtype)
ALIGNMENT = 16  # bytes; a multiple of every item size, so that no element is cut


@dataclass(frozen=True)
class Bucket:
    """Bytes ``[begin, begin + size)`` of a stream, on their way in one round."""

    round: int
    stream: Stream
    begin: int
    size: int


@dataclass(frozen=True)
class Schedule:
    """Buckets in the order (round, source, destination, dtype, begin), which every process follows.

    ``peak_staging_bytes``: rank -> most bytes of send and receive buffers alive at once when ``in_flight`` rounds of the rank overlap.
    """

    buckets: tuple[Bucket, ...]
    in_flight: int
    peak_staging_bytes: Mapping[int, int]

    @property
    def rounds(self) -> int:
        return max((bucket.round + 1 for bucket in self.buckets), default=0)


def schedule(streams: Mapping[Stream, int], bucket_bytes: int, in_flight: int) -> Schedule:
    """Cut each stream into buckets of at most ``bucket_bytes`` and give each the first round with room at both ends.

    A process issues its rounds in increasing order and waits for them in that order, so the earliest unfinished round can always
    finish: no deadlock, whatever the number of rounds in flight. Raises ValueError for sizes that cannot work.
    """
    if bucket_bytes < ALIGNMENT or in_flight < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}, in_flight={in_flight}: need at least {ALIGNMENT} bytes and one round in flight")
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    ranks = 1 + max((rank for src, dst, _ in streams for rank in (src, dst)), default=0)
    pending = []
    for src, dst, dtype in streams:
        total = streams[src, dst, dtype]
        pending += [
            (begin // limit, (dst - src) % ranks, src, dst, dtype, begin, min(limit, total - begin)) for begin in range(0, total, limit)
        ]
    loads: tuple[defaultdict[int, list[int]], defaultdict[int, list[int]]] = (
        defaultdict(list),
        defaultdict(list),
    )  # sent, received per round
    first_open: tuple[dict[int, int], dict[int, int]] = (defaultdict(int), defaultdict(int))
    buckets = []
    for _, _, src, dst, dtype, begin, size in sorted(pending):
        out, into = loads[0][src], loads[1][dst]
        now = max(first_open[0][src], first_open[1][dst])
        while (now < len(out) and out[now] + size > limit) or (now < len(into) and into[now] + size > limit):
            now += 1
        for load, opened, rank in ((out, first_open[0], src), (into, first_open[1], dst)):
            load += [0] * (now + 1 - len(load))
            load[now] += size
            while opened[rank] < len(load) and load[opened[rank]] >= limit:
                opened[rank] += 1
        buckets.append(Bucket(now, (src, dst, dtype), begin, size))
    buckets.sort(key=lambda bucket: (bucket.round, bucket.stream, bucket.begin))
    return Schedule(tuple(buckets), in_flight, _peaks(loads, in_flight))


def _peaks(loads: tuple[defaultdict[int, list[int]], defaultdict[int, list[int]]], in_flight: int) -> dict[int, int]:
    peaks = {}
    for rank in sorted({*loads[0], *loads[1]}):
        sent, received = (side[rank] for side in loads)
        busy = [
            total
            for now in range(max(len(sent), len(received)))
            if (total := (sent[now] if now < len(sent) else 0) + (received[now] if now < len(received) else 0))
        ]
        peaks[rank] = max(sum(busy[i : i + in_flight]) for i in range(len(busy)))
    return peaks
