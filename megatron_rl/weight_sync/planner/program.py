"""A plan as one rank carries it out: which strided views it packs, sends, receives, unpacks and
copies, round by round."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.flows import Edges, Stream
from megatron_rl.weight_sync.planner.nodes import elements
from megatron_rl.weight_sync.planner.plan import Plan
from megatron_rl.weight_sync.planner.schedule import BucketId
from megatron_rl.weight_sync.planner.shards import ITEMSIZE, ShardGroup, View, extent, subview
from megatron_rl.weight_sync.planner.slices import Slice, cut, intersect, slice_text


class Landing(NamedTuple):
    """A part of a chunk and its place in a parameter; ``window`` counts from the chunk's corner."""

    window: tuple[slice, ...]
    view: View


@dataclass(frozen=True)
class BucketChunk:
    """One slice of a tensor inside a bucket, in row-major order."""

    tensor: str
    begin: int  # its first element in the bucket
    region: Slice
    # On the sender, the one place it comes from; on the receiver, every place it goes to.
    landings: tuple[Landing, ...]


@dataclass(frozen=True)
class Message:
    """One bucket, seen from one of its ends: bytes ``[begin, begin + size)`` of a flow, on its way
    along a stream. ``passed_on``: the sender has it from another, and reads it where it went."""

    stream: Stream
    peer: int
    flow: int
    begin: int
    size: int
    chunks: tuple[BucketChunk, ...]
    passed_on: bool = False

    @property
    def bucket(self) -> BucketId:
        return BucketId(self.stream, self.flow, self.begin)

    @property
    def contents(self) -> str:
        """First and last tensor of the bucket with their slice_text, for messages."""
        ends = self.chunks if len(self.chunks) < 2 else (self.chunks[0], self.chunks[-1])
        return " .. ".join(chunk.tensor + slice_text(chunk.region) for chunk in ends)


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives together. ``after``: the index, among the rank's rounds, of
    the last one that must be over before; -1 where the rank passes nothing on."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    after: int = -1


@dataclass(frozen=True)
class LocalCopy:
    """A slice that the process already has: from one of its views to another."""

    tensor: str
    source: View
    target: View


class Extent(NamedTuple):
    """What a parameter must be: its dtype, and its elements from the first to the last touched."""

    dtype: str
    elements: int


@dataclass(frozen=True)
class Program:
    """``rounds`` and ``copies`` (in the order of the tensor names) of one rank, and what each of
    its parameters must be.

    ``uses``: target parameter -> number of views that will be written, or read to be passed on, so
    that its owner is notified when it is complete.
    """

    rank: int
    rounds: tuple[Round, ...]
    copies: tuple[LocalCopy, ...]
    rounds_in_flight: int
    sources: Mapping[str, Extent]
    targets: Mapping[str, Extent]
    uses: Mapping[str, int]


# tensor -> slice -> its views (several where a tensor is kept twice), each as a group of shards and
# the number of the shard in it
_Index = Mapping[str, Mapping[Slice, Sequence[tuple[ShardGroup, int]]]]


def compile_program(
    plan: Plan, rank: int, sources: Sequence[ShardGroup], targets: Sequence[ShardGroup]
) -> Program:
    """The program of ``rank``, whose own shards, with their places, are ``sources`` and
    ``targets``: those given to ``make_plan``."""
    places = _Places(_index(sources), _index(targets))
    copies = tuple(_copies(plan, rank, places))
    rounds = tuple(_rounds(plan, rank, places))
    extents = (_extents(sources), _extents(targets))
    in_flight = plan.schedule.rounds_in_flight
    return Program(rank, rounds, copies, in_flight, *extents, _count_uses(rounds, copies))


def _index(groups: Sequence[ShardGroup]) -> _Index:
    index: dict[str, dict[Slice, list]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for i, tensor in enumerate(group.names):
            index[tensor][group.region].append((group, i))
    return index


class _Places(NamedTuple):
    """The places where the rank has, and needs, slices of tensors."""

    at_source: _Index
    at_target: _Index

    def source_view(self, tensor: str, within: Slice, region: Slice) -> View:
        """Any of the places where the source shard lies will do."""
        return subview(*self.at_source[tensor][within][0], region)

    def landings(self, tensor: str, region: Slice) -> Iterator[tuple[Slice, View]]:
        """Every place of this process that needs a part of the slice, with that part."""
        for wanted, members in self.at_target[tensor].items():
            common = intersect(wanted, region)
            if common is not None:
                for member in members:
                    yield common, subview(*member, common)

    def chunk(self, piece: _Piece, is_source: bool) -> BucketChunk:
        """With the place that the source reads, or every place that a receiver writes to."""
        begin, tensor, region, within = piece
        places = self.landings(tensor, region)
        if is_source:
            places = iter([(region, self.source_view(tensor, within, region))])
        landings = tuple(Landing(_window(part, region), view) for part, view in places)
        return BucketChunk(tensor, begin, region, landings)


def _copies(plan: Plan, rank: int, places: _Places) -> Iterator[LocalCopy]:
    """What the rank has itself, in the order of the tensor names."""
    rows = []
    for number, (delivery, flows) in enumerate(plan.deliveries):
        if flows is None and rank in delivery.targets:
            tensors = plan.classes[delivery.class_index]
            # Sorted by the place of the tensor among all names, then by delivery.
            rows += [(tensors.order[i], number, tensors.names[i]) for i in delivery.turns]
    for _, number, tensor in sorted(rows):
        delivery, _ = plan.deliveries[number]
        for region, view in places.landings(tensor, delivery.region):
            yield LocalCopy(tensor, places.source_view(tensor, delivery.within, region), view)


def _parcels(plan: Plan, chosen: np.ndarray) -> dict[int, np.ndarray]:
    """Rows (delivery, number of the tensor in its class) of each flow that ``chosen`` marks: the
    slices in it, in the order that all of its ranks must follow, by tensor, then by delivery."""
    rows: dict[int, list[np.ndarray]] = defaultdict(list)
    orders = [np.array(tensors.order) for tensors in plan.classes]
    for number, (delivery, flows) in enumerate(plan.deliveries):
        if flows is None:
            continue
        # ``flows`` is [targets, sources of each], as ``delivery.sources`` is: column n is of the
        # sources that send the n-th tensor, and each k-th after it.
        every_turn = np.array(delivery.turns)
        for i, n in zip(*np.nonzero(chosen[flows])):
            turns = every_turn[n :: flows.shape[1]]
            order = orders[delivery.class_index][turns]
            rows[int(flows[i, n])].append(np.stack([order, np.full_like(turns, number), turns]))
    parcels = {}
    for flow, blocks in rows.items():
        columns = np.concatenate(blocks, axis=1)
        # ``lexsort`` counts its last key first.
        parcels[flow] = columns[1:, np.lexsort((columns[1], columns[0]))].T
    return parcels


def _rounds(plan: Plan, rank: int, places: _Places) -> Iterator[Round]:
    """The rank's part in every flow that it sends, receives or passes on."""
    own = plan.flows.edges.of_rank(rank)
    contents = _contents(plan, rank, own, places)
    # Number of the round -> what is sent in it, and what is received.
    messages: dict[int, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    schedule = plan.schedule
    for edge, bucket, number in zip(*schedule.messages(own)):
        flow = int(own.flow[edge])
        dtype = plan.flows.dtypes[plan.flows.dtype[flow]]
        stream = Stream(int(own.sender[edge]), int(own.receiver[edge]), dtype)
        begin = int(schedule.begin[bucket])
        where = (flow, begin, int(schedule.size[bucket]))
        sends, receives = messages[int(number)]
        chunks = contents[flow, begin]
        if stream.target == rank:
            receives.append(Message(stream, stream.source, *where, chunks))
        elif int(plan.flows.source[flow]) == rank:
            sends.append(Message(stream, stream.target, *where, chunks))
        else:
            again = tuple(map(_read_again, chunks))
            sends.append(Message(stream, stream.target, *where, again, passed_on=True))
    arrived: dict[tuple[int, int], int] = {}  # bucket -> index of the round that brings it
    for index, number in enumerate(sorted(messages)):
        # Both ends of a stream put its messages in the same order: gloo and NCCL match them by it.
        sends, receives = (sorted(each, key=lambda m: m.bucket) for each in messages[number])
        for message in receives:
            arrived[message.flow, message.begin] = index
        # What is passed on has arrived in an earlier round of this rank.
        after = [arrived[message.flow, message.begin] for message in sends if message.passed_on]
        yield Round(number, tuple(sends), tuple(receives), max(after, default=-1))


def _contents(
    plan: Plan, rank: int, own: Edges, places: _Places
) -> dict[tuple[int, int], tuple[BucketChunk, ...]]:
    """``(flow, first byte)`` of each bucket of the rank's edges ``own`` -> its chunks."""
    chosen = np.zeros(len(plan.flows), dtype=bool)
    chosen[own.flow] = True
    contents = {}
    for flow, parcels in _parcels(plan, chosen).items():
        is_source = int(plan.flows.source[flow]) == rank
        for begin, pieces in _fill(plan, flow, parcels):
            contents[flow, begin] = tuple(places.chunk(piece, is_source) for piece in pieces)
    return contents


class _Piece(NamedTuple):
    """A slice, or a part of one, from element ``begin`` of its bucket."""

    begin: int
    tensor: str
    region: Slice
    within: Slice  # the source shard


def _fill(plan: Plan, flow: int, parcels: np.ndarray) -> Iterator[tuple[int, list[_Piece]]]:
    """``(first byte, pieces)`` of each bucket of a flow: the parcels in their order, one cut in two
    wherever a bucket is full.

    Example: parcels of 6 and 4 elements in buckets of 8 are 6 elements and the first 2 of the other
    parcel, then its last 2.
    """
    schedule = plan.schedule
    buckets = slice(*schedule.first[flow : flow + 2])
    itemsize = ITEMSIZE[plan.flows.dtypes[plan.flows.dtype[flow]]]
    waiting = zip(schedule.begin[buckets].tolist(), schedule.size[buckets].tolist(), strict=True)
    begin, size = next(waiting)
    used = 0  # elements of the bucket
    pieces: list[_Piece] = []
    for number, turn in parcels.tolist():
        delivery = plan.deliveries[number][0]
        tensor = plan.classes[delivery.class_index].names[turn]
        left = deque([delivery.region])
        while left:
            if used == size // itemsize:
                yield begin, pieces
                begin, size = next(waiting)
                used = 0
                pieces = []
            # Either may be several slices; together they keep the row-major order.
            head, tail = cut(left.popleft(), size // itemsize - used)
            for region in head:
                pieces.append(_Piece(used, tensor, region, delivery.within))
                used += elements(region)
            left.extendleft(reversed(tail))  # in front, and ``extendleft`` turns the order around
    yield begin, pieces
    assert used == size // itemsize and next(waiting, None) is None, (
        f"flow {flow} holds less than was planned"
    )


def _read_again(chunk: BucketChunk) -> BucketChunk:
    """The chunk as it is passed on: read at a place where all of it was written to. There is one:
    what is passed on is a part of one slice that each of its ranks needs."""
    whole = _window(chunk.region, chunk.region)
    place = next(landing for landing in chunk.landings if landing.window == whole)
    return BucketChunk(chunk.tensor, chunk.begin, chunk.region, (place,))


def _window(region: Slice, outer: Slice) -> tuple[slice, ...]:
    """``region`` as an index into a tensor that holds ``outer``."""
    firsts = [first - corner for first, corner in zip(region.start, outer.start, strict=True)]
    return tuple(
        slice(first, first + size) for first, size in zip(firsts, region.shape, strict=True)
    )


def _count_uses(rounds: Sequence[Round], copies: Sequence[LocalCopy]) -> dict[str, int]:
    uses = Counter(copy.target.key for copy in copies)
    for step in rounds:
        for message in (*step.receives, *(message for message in step.sends if message.passed_on)):
            for chunk in message.chunks:
                uses.update(landing.view.key for landing in chunk.landings)
    return uses


def _extents(groups: Sequence[ShardGroup]) -> dict[str, Extent]:
    extents: dict[str, Extent] = {}
    for group in groups:
        own = Extent(group.shard.dtype, extent(group.shard))
        for key in group.keys:
            # Several shards may lie in one parameter: the one that reaches farthest counts.
            extents[key] = max(own, extents.get(key, own))
    return extents
