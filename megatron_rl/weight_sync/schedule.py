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

    ``peak_staging_bytes``: rank -> most bytes under way at once when ``in_flight`` rounds of the rank overlap. The buffers of the transport
    are that large where rounds are full, else somewhat larger: each is used again by later rounds and has the size of the largest.
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
    sent, received = _Lanes(limit), _Lanes(limit)
    buckets = []
    for _, _, src, dst, dtype, begin, size in sorted(pending):
        now = first_room(sent, src, received, dst, size)
        sent.add(src, now, size)
        received.add(dst, now, size)
        buckets.append(Bucket(now, (src, dst, dtype), begin, size))
    buckets.sort(key=lambda bucket: (bucket.round, bucket.stream, bucket.begin))
    return Schedule(tuple(buckets), in_flight, _peaks(sent, received, in_flight))


class _Lanes:
    """Bytes of each rank in each round, in one direction. Sets of rounds are the bits of an integer, so that a search is one step."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.load: defaultdict[int, list[int]] = defaultdict(list)
        self.used: defaultdict[int, int] = defaultdict(int)  # rounds with any bytes
        self.full: defaultdict[int, int] = defaultdict(int)  # rounds without room

    def add(self, rank: int, now: int, size: int) -> None:
        load = self.load[rank]
        load += [0] * (now + 1 - len(load))
        load[now] += size
        self.used[rank] |= 1 << now
        if load[now] >= self.limit:
            self.full[rank] |= 1 << now

    def room(self, rank: int, now: int) -> int:
        """Bytes that still fit."""
        load = self.load[rank]
        return self.limit - (load[now] if now < len(load) else 0)


def first_room(sent: _Lanes, src: int, received: _Lanes, dst: int, size: int) -> int:
    """The first round in which ``src`` can still send and ``dst`` still receive ``size`` bytes."""
    if size == sent.limit:
        return _lowest_zero(sent.used[src] | received.used[dst])
    taken = sent.full[src] | received.full[dst]
    while True:
        now = _lowest_zero(taken)
        if sent.room(src, now) >= size and received.room(dst, now) >= size:
            return now
        taken |= 1 << now


def _lowest_zero(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1


def _peaks(sent: _Lanes, received: _Lanes, in_flight: int) -> dict[int, int]:
    peaks = {}
    for rank in sorted({*sent.load, *received.load}):
        out, into = sent.load[rank], received.load[rank]
        busy = [
            total
            for now in range(max(len(out), len(into)))
            if (total := (out[now] if now < len(out) else 0) + (into[now] if now < len(into) else 0))
        ]
        peaks[rank] = max(sum(busy[i : i + in_flight]) for i in range(len(busy)))
    return peaks
