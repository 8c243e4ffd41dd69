"""When each bucket travels: rounds in which no process sends, or receives, more than one bucket of
bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 16  # bytes; a multiple of every item size, so that no element is cut


class Stream(NamedTuple):
    """All bytes of one dtype that go from one rank to another."""

    source: int
    target: int
    dtype: str


class BucketId(NamedTuple):
    """A bucket is known by its stream and its first byte there."""

    stream: Stream
    begin: int


@dataclass(frozen=True)
class Bucket:
    """Bytes ``[begin, begin + size)`` of a stream, sent in one round."""

    round: int
    stream: Stream
    begin: int
    size: int


@dataclass(frozen=True)
class Schedule:
    """Buckets in the order (round, stream, begin), which every process follows.

    ``peak_staging_bytes``: rank -> most bytes under way at once when ``rounds_in_flight`` rounds of
    the rank overlap. The buffers of the transport are that large where rounds are full, else
    somewhat larger: later rounds use each again, so it has the size of the largest.
    """

    buckets: tuple[Bucket, ...]
    rounds_in_flight: int
    peak_staging_bytes: Mapping[int, int]

    @property
    def rounds(self) -> int:
        return max((bucket.round + 1 for bucket in self.buckets), default=0)


class _Pending(NamedTuple):
    """A bucket without a round. Sorted, the pending buckets are in the order of placement."""

    turn: int  # number of the bucket in its stream: the first of every stream, then the second, ...
    distance: int  # from source to target; equal distances pair every rank with another one
    source: int
    target: int
    dtype: str
    begin: int
    size: int


def schedule(streams: Mapping[Stream, int], bucket_bytes: int, rounds_in_flight: int) -> Schedule:
    """Cuts each stream into buckets of at most ``bucket_bytes``, each in the first round with room
    at both ends.

    A process issues its rounds in increasing order and waits for them in that order, so the
    earliest unfinished round can always finish: no deadlock, however many rounds are in flight.
    Raises ValueError for sizes that cannot work.
    """
    if bucket_bytes < ALIGNMENT or rounds_in_flight < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes}, rounds_in_flight={rounds_in_flight}: need at least"
            f" {ALIGNMENT} bytes and one round in flight"
        )
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    sent = _Load(limit)
    received = _Load(limit)
    buckets = []
    for _, _, source, target, dtype, begin, size in sorted(_pending(streams, limit)):
        number = _first_room(sent, source, received, target, size)
        sent.add(source, number, size)
        received.add(target, number, size)
        buckets.append(Bucket(number, Stream(source, target, dtype), begin, size))
    buckets.sort(key=lambda bucket: (bucket.round, bucket.stream, bucket.begin))
    return Schedule(tuple(buckets), rounds_in_flight, _peaks(sent, received, rounds_in_flight))


def _pending(streams: Mapping[Stream, int], limit: int) -> list[_Pending]:
    """Every bucket of every stream.

    The order of placement matters: were all buckets of rank 0 placed first, its partners would have
    to wait for one another. Round after round of equal distances, every rank has one partner to
    send to and one to receive from, as in a round-robin tournament.
    """
    num_ranks = 1 + max((max(stream.source, stream.target) for stream in streams), default=0)
    pending = []
    for stream, total in streams.items():
        distance = (stream.target - stream.source) % num_ranks
        for turn, begin in enumerate(range(0, total, limit)):
            size = min(limit, total - begin)
            pending.append(_Pending(turn, distance, *stream, begin, size))
    return pending


class _Load:
    """Bytes of each rank in each round, in one direction.

    A set of rounds is kept as an integer whose bit n stands for round n. The first round that two
    ranks have free is then one union and one search for the lowest zero, however many rounds there
    are; with lists, a plan for hundreds of ranks would spend most of its time here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes: defaultdict[int, list[int]] = defaultdict(list)
        self.used: defaultdict[int, int] = defaultdict(int)  # rounds with any bytes
        self.full: defaultdict[int, int] = defaultdict(int)  # rounds without room

    def add(self, rank: int, number: int, size: int) -> None:
        load = self.bytes[rank]
        load += [0] * (number + 1 - len(load))
        load[number] += size
        self.used[rank] |= 1 << number
        if load[number] >= self.limit:
            self.full[rank] |= 1 << number

    def room(self, rank: int, number: int) -> int:
        """Bytes that still fit."""
        load = self.bytes[rank]
        return self.limit - load[number] if number < len(load) else self.limit


def _first_room(sent: _Load, source: int, received: _Load, target: int, size: int) -> int:
    """The first round in which ``source`` can still send and ``target`` still receive the bytes."""
    if size == sent.limit:  # a full bucket needs a round that is empty at both ends
        return _lowest_zero(sent.used[source] | received.used[target])
    # The last, smaller bucket of a stream may share a round. One that is not full may still lack
    # room for it, then it is crossed out and the search goes on.
    taken = sent.full[source] | received.full[target]
    while True:
        number = _lowest_zero(taken)
        if sent.room(source, number) >= size and received.room(target, number) >= size:
            return number
        taken |= 1 << number


def _lowest_zero(bits: int) -> int:
    """Position of the lowest zero bit: adding 1 carries through the ones below it, so it is the
    only bit that ``bits + 1`` gains."""
    return (~bits & (bits + 1)).bit_length() - 1


def _peaks(sent: _Load, received: _Load, rounds_in_flight: int) -> dict[int, int]:
    """Rank -> most bytes in its consecutive rounds, out and in together. Rounds in which a rank has
    nothing to do take none of its buffers."""
    peaks = {}
    for rank in sorted({*sent.bytes, *received.bytes}):
        both: defaultdict[int, int] = defaultdict(int)
        for load in (sent.bytes[rank], received.bytes[rank]):
            for number, size in enumerate(load):
                both[number] += size
        busy = [both[number] for number in sorted(both) if both[number]]
        windows = (busy[i : i + rounds_in_flight] for i in range(len(busy)))
        peaks[rank] = max(sum(window) for window in windows)
    return peaks
