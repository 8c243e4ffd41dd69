"""A plan as one rank carries it out: which strided views it packs, sends, receives, unpacks and
copies, round by round."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.weight_sync.plan import Delivery, Plan, TensorClass
from megatron_rl.weight_sync.rects import Rect, cut, intersect, slices
from megatron_rl.weight_sync.schedule import Bucket, BucketId, Stream
from megatron_rl.weight_sync.shards import ITEMSIZE, ShardGroup, View, extent, subview


class Landing(NamedTuple):
    """A part of a chunk and its place in a parameter; ``window`` counts from the chunk's corner."""

    window: tuple[slice, ...]
    view: View


@dataclass(frozen=True)
class Chunk:
    """``rect`` of a tensor, in row-major order from element ``begin`` of a bucket. ``landings``: on
    the sender, the one place it comes from; on the receiver, every place it goes to."""

    tensor: str
    begin: int
    rect: Rect
    landings: tuple[Landing, ...]


@dataclass(frozen=True)
class Message:
    """One bucket, seen from one of its ends: bytes ``[begin, begin + size)`` of the stream."""

    stream: Stream
    peer: int
    begin: int
    size: int
    chunks: tuple[Chunk, ...]

    @property
    def bucket(self) -> BucketId:
        return BucketId(self.stream, self.begin)

    @property
    def contents(self) -> str:
        """First and last tensor of the bucket with their slices, for messages."""
        ends = self.chunks[:1] if len(self.chunks) == 1 else (self.chunks[0], self.chunks[-1])
        return " .. ".join(chunk.tensor + slices(chunk.rect) for chunk in ends)


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives together."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Copy:
    """A rectangle that the process already has: from one of its views to another."""

    tensor: str
    source: View
    target: View


class Extent(NamedTuple):
    """What a parameter must be: its dtype, and the number of elements from its first to the last
    one touched."""

    dtype: str
    elements: int


@dataclass(frozen=True)
class Program:
    """``rounds`` and ``copies`` (in the order of the tensor names) of one rank, and what each of
    its parameters must be.

    ``writes``: target parameter -> number of views that will be written, so that its owner can be
    told when it is complete.
    """

    rank: int
    rounds: tuple[Round, ...]
    copies: tuple[Copy, ...]
    rounds_in_flight: int
    sources: Mapping[str, Extent]
    targets: Mapping[str, Extent]
    writes: Mapping[str, int]


class _Member(NamedTuple):
    """Shard ``index`` of a group."""

    group: ShardGroup
    index: int


# tensor -> rectangle -> the shards that are that rectangle (several where a tensor is kept twice)
_Index = Mapping[str, Mapping[Rect, Sequence[_Member]]]


class _Parcel(NamedTuple):
    """One tensor's rectangle on its way. The first two fields give the order inside a stream, which
    both ends must follow: by tensor name, then by delivery."""

    order: int  # place of the tensor among all names
    delivery: int  # number of the delivery in its class
    tensor: str
    rect: Rect
    within: Rect  # the source shard


class _Packed(NamedTuple):
    """A parcel, or a part of one, from element ``begin`` of its bucket."""

    begin: int
    parcel: _Parcel
    rect: Rect


def compile_program(
    plan: Plan, rank: int, sources: Sequence[ShardGroup], targets: Sequence[ShardGroup]
) -> Program:
    """The program of ``rank``, whose own shards, with their places, are ``sources`` and
    ``targets``: those given to ``make_plan``."""
    at_source = _index(sources)
    at_target = _index(targets)
    parcels: dict[Stream, list[_Parcel]] = defaultdict(list)
    for tensors in plan.classes:
        for parcel, source, target in _parcels(tensors, rank):
            parcels[Stream(source, target, tensors.dtype)].append(parcel)
    local = [
        parcel
        for stream, own in parcels.items()
        if stream.source == stream.target
        for parcel in own
    ]
    copies = tuple(
        Copy(parcel.tensor, _source_view(at_source, parcel, rect), view)
        for parcel in sorted(local)
        for rect, view in _landings(at_target[parcel.tensor], parcel.rect)
    )
    rounds = tuple(_rounds(plan, rank, parcels, at_source, at_target))
    return Program(
        rank,
        rounds,
        copies,
        plan.schedule.rounds_in_flight,
        _extents(sources),
        _extents(targets),
        _count_writes(rounds, copies),
    )


def _index(groups: Sequence[ShardGroup]) -> _Index:
    index: dict[str, dict[Rect, list[_Member]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for i, tensor in enumerate(group.names):
            index[tensor][group.rect].append(_Member(group, i))
    return index


def _parcels(tensors: TensorClass, rank: int) -> Iterator[tuple[_Parcel, int, int]]:
    """The parcels of a class that the rank sends, receives or keeps, with source and target."""
    for number, delivery in enumerate(tensors.deliveries):
        for i in _taking_part(delivery, rank, len(tensors.names)):
            source = delivery.sources[i % len(delivery.sources)]
            parcel = _Parcel(
                tensors.order[i], number, tensors.names[i], delivery.rect, delivery.within
            )
            yield parcel, source, delivery.target


def _taking_part(delivery: Delivery, rank: int, count: int) -> range:
    """The tensors, of ``count``, that the rank receives or sends: the sources take turns."""
    if delivery.target == rank:
        return range(count)
    if rank in delivery.sources:
        return range(delivery.sources.index(rank), count, len(delivery.sources))
    return range(0)


def _rounds(
    plan: Plan,
    rank: int,
    parcels: Mapping[Stream, Sequence[_Parcel]],
    at_source: _Index,
    at_target: _Index,
) -> Iterator[Round]:
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    of_stream: dict[Stream, list[Bucket]] = defaultdict(list)
    for bucket in plan.schedule.buckets:
        if rank in (bucket.stream.source, bucket.stream.target):
            buckets[bucket.round].append(bucket)
            of_stream[bucket.stream].append(bucket)
    contents: dict[BucketId, list[_Packed]] = {}
    for stream, own in of_stream.items():
        contents |= _fill(sorted(parcels[stream]), own)
    for number in sorted(buckets):
        sends = []
        receives = []
        for bucket in buckets[number]:
            stream = bucket.stream
            packed = contents[BucketId(stream, bucket.begin)]
            if stream.source == rank:
                chunks = tuple(_chunk_out(part, at_source) for part in packed)
                sends.append(Message(stream, stream.target, bucket.begin, bucket.size, chunks))
            else:
                chunks = tuple(_chunk_in(part, at_target) for part in packed)
                receives.append(Message(stream, stream.source, bucket.begin, bucket.size, chunks))
        yield Round(number, tuple(sends), tuple(receives))


def _fill(parcels: Sequence[_Parcel], buckets: Sequence[Bucket]) -> dict[BucketId, list[_Packed]]:
    """What is in each bucket of one stream: the parcels in their order, one cut in two wherever a
    bucket is full."""
    stream = buckets[0].stream
    itemsize = ITEMSIZE[stream.dtype]
    waiting = iter(sorted(buckets, key=lambda bucket: bucket.begin))
    contents: dict[BucketId, list[_Packed]] = {}
    packed: list[_Packed] = []
    room = 0  # elements that still fit into the bucket
    used = 0
    for parcel in parcels:
        left = deque([parcel.rect])
        while left:
            if room == used:
                bucket = next(waiting)
                packed = []
                contents[BucketId(stream, bucket.begin)] = packed
                room = bucket.size // itemsize
                used = 0
            head, tail = cut(left.popleft(), room - used)
            for rect in head:
                packed.append(_Packed(used, parcel, rect))
                used += math.prod(rect.shape)
            left.extendleft(reversed(tail))
    assert next(waiting, None) is None, f"stream {stream} holds less than was planned"
    return contents


def _landings(places: Mapping[Rect, Sequence[_Member]], rect: Rect) -> Iterator[tuple[Rect, View]]:
    """Every place of this process that wants a part of the rectangle, with that part."""
    for wanted, members in places.items():
        common = intersect(wanted, rect)
        if common is not None:
            for group, index in members:
                yield common, subview(group, index, common)


def _source_view(at_source: _Index, parcel: _Parcel, rect: Rect) -> View:
    """Any of the places where the source shard lies will do."""
    group, index = at_source[parcel.tensor][parcel.within][0]
    return subview(group, index, rect)


def _chunk_out(part: _Packed, at_source: _Index) -> Chunk:
    window = tuple(slice(0, size) for size in part.rect.shape)
    view = _source_view(at_source, part.parcel, part.rect)
    return Chunk(part.parcel.tensor, part.begin, part.rect, (Landing(window, view),))


def _chunk_in(part: _Packed, at_target: _Index) -> Chunk:
    landings = tuple(
        Landing(_window(wanted, part.rect), view)
        for wanted, view in _landings(at_target[part.parcel.tensor], part.rect)
    )
    return Chunk(part.parcel.tensor, part.begin, part.rect, landings)


def _window(rect: Rect, outer: Rect) -> tuple[slice, ...]:
    """``rect`` as an index into a tensor that holds ``outer``."""
    firsts = [first - corner for first, corner in zip(rect.start, outer.start, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, rect.shape, strict=True))


def _count_writes(rounds: Sequence[Round], copies: Sequence[Copy]) -> dict[str, int]:
    writes: dict[str, int] = defaultdict(int)
    for step in rounds:
        for message in step.receives:
            for chunk in message.chunks:
                for landing in chunk.landings:
                    writes[landing.view.key] += 1
    for copy in copies:
        writes[copy.target.key] += 1
    return dict(writes)


def _extents(groups: Sequence[ShardGroup]) -> dict[str, Extent]:
    extents: dict[str, Extent] = {}
    for group in groups:
        elements = extent(group.shard)
        for key in group.keys:
            before = extents[key].elements if key in extents else 0
            extents[key] = Extent(group.shard.dtype, max(elements, before))
    return extents
