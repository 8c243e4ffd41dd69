"""A plan as one rank carries it out: which strided views it packs, sends, receives, unpacks and copies, round by round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.weight_sync.boxes import ITEMSIZE, Boxes, Rect, View, cut, intersect, slices, subview
from megatron_rl.weight_sync.plan import Plan, TensorClass
from megatron_rl.weight_sync.schedule import Bucket, Stream


@dataclass(frozen=True)
class Chunk:
    """``rect`` of a tensor, in row-major order from element ``begin`` of a bucket. ``views``: on the sender, the one place it
    comes from; on the receiver, every place it goes to, each with the part of the chunk that goes there."""

    tensor: str
    begin: int
    rect: Rect
    views: tuple[tuple[tuple[slice, ...], View], ...]


@dataclass(frozen=True)
class Message:
    """One bucket, seen from one of its ends: bytes ``[begin, begin + size)`` of the stream (source, destination, dtype)."""

    stream: Stream
    peer: int
    begin: int
    size: int
    chunks: tuple[Chunk, ...]

    @property
    def contents(self) -> str:
        """First and last tensor of the bucket with their slices, for messages."""
        ends = (self.chunks[0], self.chunks[-1]) if len(self.chunks) > 1 else self.chunks
        return " .. ".join(chunk.tensor + slices(chunk.rect) for chunk in ends)


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives together."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Copy:
    """A rectangle that the process already holds: from one of its views to another."""

    tensor: str
    source: View
    destination: View


@dataclass(frozen=True)
class Program:
    """``rounds`` and ``copies`` (in the order of the tensor names) of one rank, and what each parameter must be: its dtype, and the
    number of elements from its first to the last one touched.

    ``writes``: destination parameter -> number of views that will be written, so that its owner can be told when it is complete.
    """

    rank: int
    rounds: tuple[Round, ...]
    copies: tuple[Copy, ...]
    in_flight: int
    sources: Mapping[str, tuple[str, int]]
    destinations: Mapping[str, tuple[str, int]]
    writes: Mapping[str, int]


Place = tuple[Boxes, int]
Index = dict[str, dict[Rect, list[Place]]]
Item = tuple[int, int, str, Rect, Rect]  # (place of the tensor among all names, piece, tensor, rect, box it is held in)


def compile_program(plan: Plan, rank: int, held: Sequence[Boxes], wanted: Sequence[Boxes]) -> Program:
    """The program of ``rank``, whose own boxes, with their places, are ``held`` and ``wanted``; those given to ``make_plan``."""
    sources, destinations = _index(held), _index(wanted)
    streams: dict[Stream, list[Item]] = defaultdict(list)
    for group in plan.classes:
        for item, src, dst in _transfers(group, rank):
            streams[src, dst, group.dtype].append(item)
    local = sorted(item for (src, dst, _), items in streams.items() if src == dst for item in items)
    copies = tuple(
        Copy(tensor, subview(*sources[tensor][box][0], part), view)
        for _, _, tensor, rect, box in local
        for part, view in _landing(destinations[tensor], rect)
    )
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in plan.schedule.buckets:
        if rank in bucket.stream[:2]:
            buckets[bucket.round].append(bucket)
    contents = {stream: _fill(sorted(items), plan, stream) for stream, items in streams.items() if stream[0] != stream[1]}
    rounds = []
    for number in sorted(buckets):
        sends, receives = [], []
        for bucket in buckets[number]:
            src, dst, _ = bucket.stream
            parts = contents[bucket.stream][bucket.begin]
            if src == rank:
                chunks = tuple(_packed(tensor, begin, rect, subview(*sources[tensor][box][0], rect)) for begin, tensor, rect, box in parts)
                sends.append(Message(bucket.stream, dst, bucket.begin, bucket.size, chunks))
            else:
                chunks = tuple(_unpacked(tensor, begin, rect, destinations[tensor]) for begin, tensor, rect, _ in parts)
                receives.append(Message(bucket.stream, src, bucket.begin, bucket.size, chunks))
        rounds.append(Round(number, tuple(sends), tuple(receives)))
    writes: dict[str, int] = defaultdict(int)
    for key in _written_keys(rounds, copies):
        writes[key] += 1
    return Program(rank, tuple(rounds), copies, plan.schedule.in_flight, _extents(held), _extents(wanted), dict(writes))


def _index(boxes: Sequence[Boxes]) -> Index:
    index: Index = defaultdict(lambda: defaultdict(list))
    for group in boxes:
        for i, tensor in enumerate(group.tensors):
            index[tensor][group.start, group.shape].append((group, i))
    return index


def _transfers(group: TensorClass, rank: int) -> Iterator[tuple[Item, int, int]]:
    """The transfers of a class in which the rank takes part, with their source and destination."""
    for number, piece in enumerate(group.pieces):
        turns = len(piece.sources)
        if piece.dst == rank:
            mine: Sequence[int] = range(len(group.tensors))
        elif rank in piece.sources:
            mine = range(piece.sources.index(rank), len(group.tensors), turns)
        else:
            continue
        for i in mine:
            yield (group.order[i], number, group.tensors[i], piece.rect, piece.held), piece.sources[i % turns], piece.dst


def _fill(items: Sequence[Item], plan: Plan, stream: Stream) -> dict[int, list[tuple[int, str, Rect, Rect]]]:
    """Contents of each bucket of a stream, by its first byte: ``(element in the bucket, tensor, rect, box it is held in)``."""
    itemsize = ITEMSIZE[stream[2]]
    limits = sorted((b.begin // itemsize, b.size // itemsize) for b in plan.schedule.buckets if b.stream == stream)
    contents: dict[int, list[tuple[int, str, Rect, Rect]]] = {begin * itemsize: [] for begin, _ in limits}
    number = used = 0
    for _, _, tensor, rect, box in items:
        todo = [rect]
        while todo:
            begin, size = limits[number]
            part = todo.pop(0)
            head, tail = cut(part, size - used)
            for fitting in head:
                contents[begin * itemsize].append((used, tensor, fitting, box))
                used += math.prod(fitting[1])
            todo = tail + todo
            if used == size:
                number, used = number + 1, 0
    assert number == len(limits), f"stream {stream} holds less than was planned"
    return contents


def _landing(index: Mapping[Rect, list[Place]], rect: Rect) -> Iterator[tuple[Rect, View]]:
    """Every place of this process that wants a part of the rectangle, with that part."""
    for wish, places in index.items():
        part = intersect(wish, rect)
        if part is not None:
            for box, i in places:
                yield part, subview(box, i, part)


def _packed(tensor: str, begin: int, rect: Rect, view: View) -> Chunk:
    return Chunk(tensor, begin, rect, ((tuple(slice(0, n) for n in rect[1]), view),))


def _unpacked(tensor: str, begin: int, rect: Rect, index: Mapping[Rect, list[Place]]) -> Chunk:
    views = tuple(
        (tuple(slice(a - b, a - b + n) for a, n, b in zip(*part, rect[0], strict=True)), view) for part, view in _landing(index, rect)
    )
    return Chunk(tensor, begin, rect, views)


def _written_keys(rounds: Sequence[Round], copies: Sequence[Copy]) -> Iterator[str]:
    for step in rounds:
        for message in step.receives:
            for chunk in message.chunks:
                for _, (key, *_) in chunk.views:
                    yield key
    for copy in copies:
        yield copy.destination[0]


def _extents(boxes: Sequence[Boxes]) -> dict[str, tuple[str, int]]:
    extents: dict[str, tuple[str, int]] = {}
    for group in boxes:
        end = group.offset + sum((n - 1) * s for n, s in zip(group.shape, group.stride, strict=True)) + 1
        for key in group.keys:
            extents[key] = (group.dtype, max(end, extents[key][1]) if key in extents else end)
    return extents
