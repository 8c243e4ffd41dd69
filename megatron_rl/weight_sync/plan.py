"""Who sends what to whom: a pure function of what every process holds and wants.

Tensors that are held and wanted in the same way by the same ranks form one class and are planned once, so the cost depends on the
number of kinds of tensors, not on their number, and no weight is allocated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_rl.weight_sync.boxes import ITEMSIZE, Boxes, Rect, check_written_once, covered, intersect, natural, slices, subtract
from megatron_rl.weight_sync.schedule import Schedule, Stream, schedule

LINKS = ("same_process", "same_node", "across_nodes")
Side = Mapping[int, Sequence[Boxes]]


@dataclass(frozen=True)
class Piece:
    """One rectangle, wanted by ``dst``, of every tensor of a class. Tensor i comes from ``sources[i % len(sources)]``, out of the
    box ``held`` of that rank."""

    dst: int
    rect: Rect
    held: Rect
    sources: tuple[int, ...]


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one shape and dtype with the same holders and the same takers. ``order``: places in the order of all names."""

    tensors: tuple[str, ...]
    order: tuple[int, ...]
    full: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """The transfers, their buckets and their cost.

    ``lower_bound``: bytes that a process wants and does not hold, each counted once per process, summed over processes; no plan can
    send less. ``gather_bytes``: what arrives when every rollout process receives every tensor whole.
    """

    classes: tuple[TensorClass, ...]
    streams: Mapping[Stream, int]  # (source, destination, dtype) -> bytes
    schedule: Schedule
    bytes_by_link: Mapping[str, int]
    lower_bound: int
    gather_bytes: int

    @property
    def bytes_local(self) -> int:
        return self.bytes_by_link["same_process"]

    @property
    def bytes_sent(self) -> int:
        return sum(self.streams.values())

    @property
    def ratio(self) -> float:
        """``bytes_sent / lower_bound``; 1 when there is nothing to send and nothing is sent."""
        return self.bytes_sent / self.lower_bound if self.lower_bound else float(self.bytes_sent + 1)


def make_plan(
    held: Side,
    wanted: Side,
    *,
    gpus_per_node: int,
    bucket_bytes: int,
    in_flight: int = 2,
    replicas: Sequence[Sequence[int]] | None = None,
    ignore: Collection[str] = (),
) -> Plan:
    """The plan that brings every wanted box to its process: from itself if it holds it, else from its node, else from anywhere;
    among equal holders the senders share the load.

    ``held``, ``wanted``: rank -> boxes. Node of a rank: ``rank // gpus_per_node``. ``replicas``: groups of ranks that must together
    want every element of every tensor (None: all ranks of ``wanted``). ``ignore``: tensors that are held and rightly wanted by nobody.
    Deterministic: equal inputs give equal plans on every rank.
    Raises ValueError, naming tensor, ranks and slices, for a tensor or an element nobody holds or nobody wants, for a shape or dtype
    that differs, and for an element of a parameter that would be written twice.
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node={gpus_per_node}: need at least 1")
    for rank in sorted(wanted):
        check_written_once(rank, wanted[rank])
    groups = [tuple(group) for group in replicas] if replicas is not None else [tuple(sorted(wanted))]
    planner = _Planner(gpus_per_node, groups, frozenset(ignore))
    classes = tuple(planner.solve(*group) for group in _classes(held, wanted))
    buckets = schedule(planner.streams, bucket_bytes, in_flight)
    links = {link: planner.links[link] for link in LINKS}
    plan = Plan(classes, dict(sorted(planner.streams.items())), buckets, links, planner.lower_bound, planner.gather_bytes)
    assert plan.ratio == 1.0, f"the plan sends {plan.bytes_sent} bytes where {plan.lower_bound} are needed"
    return plan


Pattern = tuple[bool, int, tuple[int, ...], str, Rect]  # (is wanted, rank, full, dtype, rect)


def _classes(held: Side, wanted: Side) -> list[tuple[tuple[str, ...], tuple[int, ...], list[Pattern]]]:
    """``(tensors, their places in the order of all names, patterns)`` of each class, in the order of their first tensors."""
    everything = [(side, rank, box) for side, ranks in ((False, held), (True, wanted)) for rank in sorted(ranks) for box in ranks[rank]]
    names = sorted({name for tensors in {box.tensors for _, _, box in everything} for name in tensors}, key=natural)
    number = {name: i for i, name in enumerate(names)}
    columns: dict[tuple[str, ...], np.ndarray] = {}
    patterns: dict[Pattern, int] = {}
    tensor_ids, pattern_ids = [], []
    for side, rank, box in everything:
        if box.tensors not in columns:
            columns[box.tensors] = np.array([number[name] for name in box.tensors], dtype=np.int64)
        column = columns[box.tensors]
        pattern = patterns.setdefault((side, rank, box.full, box.dtype, (box.start, box.shape)), len(patterns))
        tensor_ids.append(column)
        pattern_ids.append(np.full(len(column), pattern, dtype=np.int64))
    if not names:
        return []
    codes = np.sort(np.concatenate(tensor_ids) * len(patterns) + np.concatenate(pattern_ids))
    codes = codes[np.diff(codes, prepend=-1) > 0]  # a box named twice counts once
    ids = codes % len(patterns)
    ends = np.searchsorted(codes // len(patterns), np.arange(len(names)), side="right")
    members: dict[bytes, list[int]] = defaultdict(list)
    begin = 0
    for i, end in enumerate(ends):
        members[ids[begin:end].tobytes()].append(i)
        begin = end
    listed = list(patterns)
    return [
        (tuple(names[i] for i in group), tuple(group), [listed[p] for p in np.frombuffer(key, dtype=np.int64)])
        for key, group in members.items()
    ]


_covered = lru_cache(maxsize=65536)(covered)


class _Planner:
    """Accumulates load and cost over the classes, in order."""

    def __init__(self, gpus_per_node: int, replicas: list[tuple[int, ...]], ignore: frozenset[str]) -> None:
        self.gpus_per_node, self.replicas, self.ignore = gpus_per_node, replicas, ignore
        self.load: dict[int, int] = defaultdict(int)
        self.streams: dict[Stream, int] = defaultdict(int)
        self.links: dict[str, int] = defaultdict(int)
        self.lower_bound = self.gather_bytes = 0

    def link(self, a: int, b: int) -> str:
        if a == b:
            return LINKS[0]
        return LINKS[1] if a // self.gpus_per_node == b // self.gpus_per_node else LINKS[2]

    def solve(self, tensors: tuple[str, ...], order: tuple[int, ...], patterns: list[Pattern]) -> TensorClass:
        """The pieces of one class."""
        full, dtype = _one_type(tensors[0], patterns)
        size = ITEMSIZE[dtype] * len(tensors)
        held: dict[int, list[Rect]] = defaultdict(list)
        wanted: dict[int, list[Rect]] = defaultdict(list)
        for is_wanted, rank, _, _, rect in patterns:
            (wanted if is_wanted else held)[rank].append(rect)
        self._check_wanted(tensors, full, held, wanted)
        if not wanted:
            return TensorClass(tensors, order, full, dtype, ())
        holders: dict[Rect, list[int]] = defaultdict(list)
        for rank in sorted(held):
            for rect in held[rank]:
                holders[rect].append(rank)
        pieces: list[Piece] = []
        for dst in sorted(wanted):
            pieces += self._bring(dst, wanted[dst], holders, tensors, dtype)
            mine = tuple(held[dst]) if dst in held else ()
            self.lower_bound += size * (_covered(tuple(wanted[dst])) - _covered(tuple(wanted[dst]), mine))
        for rank in (rank for group in self.replicas for rank in group):
            mine = tuple(held[rank]) if rank in held else ()
            self.gather_bytes += size * (math.prod(full) - _covered(mine))
        return TensorClass(tensors, order, full, dtype, tuple(pieces))

    def _check_wanted(self, tensors: tuple[str, ...], full: tuple[int, ...], held: Mapping, wanted: Mapping) -> None:
        whole: Rect = ((0,) * len(full), full)
        for rank, rects in [*held.items(), *wanted.items()]:
            for rect in rects:
                if intersect(rect, whole) != rect:
                    raise ValueError(f"{tensors[0]}: rank {rank} names {slices(rect)}, which is empty or outside of its shape {full}")
        if not wanted and set(tensors) <= self.ignore:
            return
        for group in self.replicas:
            asked = [rect for rank in group if rank in wanted for rect in wanted[rank]]
            if _covered(tuple(asked)) == math.prod(full):
                continue
            lost = _without(whole, asked)
            raise ValueError(
                f"{tensors[0]}{slices(lost[0])} (and the same slices of {len(tensors) - 1} other tensors) is held by the training ranks "
                f"{sorted(held)} but wanted by none of the rollout ranks {sorted(group)}: its update would be lost. Correct the recorded "
                "layout, or name the tensor in ignore"
            )

    def _bring(
        self, dst: int, wanted: Sequence[Rect], holders: Mapping[Rect, list[int]], tensors: tuple[str, ...], dtype: str
    ) -> list[Piece]:
        """Disjoint pieces that cover the wanted rectangles, nearest holders first."""
        todo: list[Rect] = []
        for rect in wanted:  # what is wanted in two places travels once
            todo += _without(rect, todo)
        near: dict[str, list[tuple[Rect, tuple[int, ...]]]] = defaultdict(list)
        for rect, ranks in holders.items():
            links = [self.link(rank, dst) for rank in ranks]
            for link in LINKS:
                if link in links:
                    near[link].append((rect, tuple(rank for rank, x in zip(ranks, links, strict=True) if x == link)))
                    break
        pieces: list[Piece] = []
        for link in LINKS:
            for rect, ranks in near[link]:
                for part in [common for wish in todo if (common := intersect(wish, rect)) is not None]:
                    pieces.append(Piece(dst, part, rect, self._share(ranks, dst, link, math.prod(part[1]), len(tensors), dtype)))
                    todo = [rest for wish in todo for rest in subtract(wish, part)]
        if todo:
            raise ValueError(
                f"{tensors[0]}{slices(todo[0])} (and the same slices of {len(tensors) - 1} other tensors) is wanted by rank {dst} but held "
                f"by no training rank; holders of other parts: {sorted({rank for ranks in holders.values() for rank in ranks})}. "
                "Correct the layout or map the missing parameter"
            )
        return pieces

    def _share(self, ranks: tuple[int, ...], dst: int, link: str, elements: int, count: int, dtype: str) -> tuple[int, ...]:
        """The holders, least loaded first, each charged with its part of ``count`` tensors."""
        sources = ranks if link == LINKS[0] else tuple(sorted(ranks, key=lambda rank: (self.load[rank], rank)))
        size = elements * ITEMSIZE[dtype]
        self.links[link] += size * count
        if link == LINKS[0]:
            return sources
        each, more = divmod(count, len(sources))
        for i, src in enumerate(sources):
            mine = size * (each + (i < more))
            if mine:
                self.load[src] += mine
                self.streams[src, dst, dtype] += mine
        return sources


def _without(rect: Rect, others: Sequence[Rect]) -> list[Rect]:
    rest = [rect]
    for other in others:
        rest = [part for piece in rest for part in subtract(piece, other)]
    return rest


def _one_type(tensor: str, patterns: Sequence[Pattern]) -> tuple[tuple[int, ...], str]:
    _, first, full, dtype, _ = patterns[0]
    for is_wanted, rank, other, other_dtype, _ in patterns:
        if (other, other_dtype) != (full, dtype):
            raise ValueError(
                f"{tensor}: rank {first} has shape {full} and dtype {dtype}, rank {rank} ({'rollout' if is_wanted else 'training'}) has "
                f"shape {other} and dtype {other_dtype}; make both sides agree (precision.params and rollout.dtype, vocabulary, model path)"
            )
    if dtype not in ITEMSIZE:
        raise ValueError(f"{tensor}: dtype {dtype!r} is not one of {sorted(ITEMSIZE)}")
    return full, dtype
