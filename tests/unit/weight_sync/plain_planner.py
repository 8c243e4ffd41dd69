"""A planner that knows nothing of roles, chains and cells: target after target, from the nearest
source. Each process gets every byte from a source itself, so a node gets some of them several
times. What it brings to each process, and what that must cost, is what the real one is compared
with.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.flows import Stream
from megatron_rl.weight_sync.planner.shards import ITEMSIZE, ShardGroup, check_written_once, natural
from megatron_rl.weight_sync.planner.slices import (
    Slice,
    covered,
    intersect,
    slice_text,
    subtract,
    without,
)

LINKS = ("same_process", "same_node", "across_nodes")  # nearest first
SAME_PROCESS, SAME_NODE, ACROSS_NODES = LINKS
Side = Mapping[int, Sequence[ShardGroup]]  # rank -> its shards


@dataclass(frozen=True)
class Delivery:
    """One slice, wanted by rank ``target``, of every tensor of a class. Tensor i comes from
    ``sources[i % len(sources)]``, where it is a part of the shard ``within``."""

    target: int
    region: Slice
    within: Slice
    sources: tuple[int, ...]


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one shape and dtype with the same sources and the same targets. ``order``: their
    places in the order of all names."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    full: tuple[int, ...]
    dtype: str
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True)
class PlainPlan:
    """The deliveries and their cost.

    ``lower_bound``: bytes that a process wants and does not have, each counted once per process,
    summed over processes; no plan can send less. ``gather_bytes``: what arrives when every rollout
    process receives every tensor whole.
    """

    classes: tuple[TensorClass, ...]
    streams: Mapping[Stream, int]  # bytes of each
    bytes_by_link: Mapping[str, int]
    lower_bound: int
    gather_bytes: int

    @property
    def bytes_local(self) -> int:
        return self.bytes_by_link[SAME_PROCESS]

    @property
    def bytes_sent(self) -> int:
        return sum(self.streams.values())

    @property
    def ratio(self) -> float:
        """``bytes_sent / lower_bound``; 1 when there is nothing to send and nothing is sent."""
        if self.lower_bound == 0:
            return float(self.bytes_sent + 1)
        return self.bytes_sent / self.lower_bound


def plain_plan(
    sources: Side,
    targets: Side,
    *,
    gpus_per_node: int,
    replicas: Sequence[Sequence[int]] | None = None,
) -> PlainPlan:
    """The plan that brings every target shard to its process: from itself if it has it, else from
    its node, else from anywhere; among equal sources the senders share the load.

    ``sources``, ``targets``: what each rank has, and wants. Node of a rank:
    ``rank // gpus_per_node``. ``replicas``: groups of ranks that must together want every element
    of every tensor (None: all ranks of ``targets`` are one). Deterministic: equal inputs give
    equal plans on every rank.

    Raises ValueError, naming tensor, ranks and slices, for a tensor or an element nobody has or
    nobody wants, for a shape or dtype that differs, and for an element of a parameter that would be
    written twice.
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node={gpus_per_node}: need at least 1")
    for rank in sorted(targets):
        check_written_once(rank, targets[rank])
    if replicas is None:
        replicas = [sorted(targets)]
    planner = _Planner(gpus_per_node, replicas)
    classes = tuple(planner.solve(members) for members in _classes(sources, targets))
    plan = PlainPlan(
        classes,
        streams=dict(sorted(planner.streams.items())),
        bytes_by_link={link: planner.bytes_by_link[link] for link in LINKS},
        lower_bound=planner.lower_bound,
        gather_bytes=planner.gather_bytes,
    )
    assert plan.ratio == 1.0, (
        f"the plan sends {plan.bytes_sent} bytes where {plan.lower_bound} are needed"
    )
    return plan


class _Pattern(NamedTuple):
    """How one rank has, or wants, a tensor; what distinguishes one class from another."""

    is_target: bool
    rank: int
    full: tuple[int, ...]
    dtype: str
    region: Slice


class _Members(NamedTuple):
    """The tensors of a class, their places in the order of all names, and their patterns."""

    names: tuple[str, ...]
    order: tuple[int, ...]
    patterns: list[_Pattern]


def _classes(sources: Side, targets: Side) -> list[_Members]:
    """Tensors with the same set of patterns, in the order of their first tensors.

    A large mixture of experts has millions of pairs (tensor, pattern), over which Python must not
    loop. Each pair becomes one integer, ``tensor * number of patterns + pattern``. Sorted, the
    integers of one tensor stand together with its patterns in increasing order, and the bytes of
    that interval are the key by which tensors are grouped.
    """
    every_group = [
        (is_target, rank, group)
        for is_target, side in ((False, sources), (True, targets))
        for rank in sorted(side)
        for group in side[rank]
    ]
    columns = {group.names for _, _, group in every_group}  # most groups share their names
    names = sorted({name for column in columns for name in column}, key=natural)
    if not names:
        return []
    place = {name: i for i, name in enumerate(names)}
    places = {column: np.array([place[name] for name in column]) for column in columns}
    numbers: dict[_Pattern, int] = {}
    tensor_ids = []
    pattern_ids = []
    for is_target, rank, group in every_group:
        shard = group.shard
        pattern = _Pattern(is_target, rank, shard.full, shard.dtype, group.region)
        column = places[group.names]
        tensor_ids.append(column)
        pattern_ids.append(np.full(len(column), numbers.setdefault(pattern, len(numbers))))
    pairs = np.sort(np.concatenate(tensor_ids) * len(numbers) + np.concatenate(pattern_ids))
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # a shard that is named twice counts once
    ends = np.searchsorted(pairs // len(numbers), np.arange(len(names)), side="right")
    members: dict[bytes, list[int]] = defaultdict(list)
    begin = 0
    patterns_of = pairs % len(numbers)
    for tensor, end in enumerate(ends):
        members[patterns_of[begin:end].tobytes()].append(tensor)
        begin = end
    patterns = list(numbers)
    return [
        _Members(
            tuple(names[i] for i in tensors),
            tuple(tensors),
            [patterns[i] for i in np.frombuffer(key, dtype=patterns_of.dtype)],
        )
        for key, tensors in members.items()
    ]


# The ranks of a data-parallel group, and the replicas, ask for the same slices.
_covered = lru_cache(maxsize=65536)(covered)


class _Planner:
    """Plans class after class, and keeps the load of every sender and the cost so far."""

    def __init__(self, gpus_per_node: int, replicas: Sequence[Sequence[int]]) -> None:
        self.gpus_per_node = gpus_per_node
        self.replicas = replicas
        self.load: dict[int, int] = defaultdict(int)  # bytes that each rank sends
        self.streams: dict[Stream, int] = defaultdict(int)
        self.bytes_by_link: dict[str, int] = defaultdict(int)
        self.lower_bound = 0
        self.gather_bytes = 0

    def link(self, source: int, target: int) -> str:
        if source == target:
            return SAME_PROCESS
        if source // self.gpus_per_node == target // self.gpus_per_node:
            return SAME_NODE
        return ACROSS_NODES

    def solve(self, members: _Members) -> TensorClass:
        """The deliveries of one class."""
        full, dtype = _one_type(members)
        sources: dict[int, list[Slice]] = defaultdict(list)
        targets: dict[int, list[Slice]] = defaultdict(list)
        for pattern in members.patterns:
            side = targets if pattern.is_target else sources
            side[pattern.rank].append(pattern.region)
        self._check_wanted(members.names, full, sources, targets)
        if not targets:
            return TensorClass(members.names, members.order, full, dtype, ())
        ranks_with: dict[Slice, list[int]] = defaultdict(list)
        for rank in sorted(sources):
            for region in sources[rank]:
                ranks_with[region].append(rank)
        deliveries: list[Delivery] = []
        for target in sorted(targets):
            deliveries += self._bring(target, targets[target], ranks_with, members.names, dtype)
        self._count(full, ITEMSIZE[dtype] * len(members.names), sources, targets)
        return TensorClass(members.names, members.order, full, dtype, tuple(deliveries))

    def _count(
        self,
        full: tuple[int, ...],
        size: int,
        sources: Mapping[int, list[Slice]],
        targets: Mapping[int, list[Slice]],
    ) -> None:
        """Adds the lower bound and the bytes of a gather; ``size``: of one element of all tensors
        of the class."""
        local = {rank: tuple(regions) for rank, regions in sources.items()}
        for rank, regions in targets.items():
            wanted = tuple(regions)
            missing = _covered(wanted) - _covered(wanted, local.get(rank, ()))
            self.lower_bound += size * missing
        for replica in self.replicas:
            for rank in replica:
                missing = math.prod(full) - _covered(local.get(rank, ()))
                self.gather_bytes += size * missing

    def _check_wanted(
        self, names: tuple[str, ...], full: tuple[int, ...], sources: Mapping, targets: Mapping
    ) -> None:
        whole = Slice((0,) * len(full), full)
        for rank, regions in [*sources.items(), *targets.items()]:
            for region in regions:
                if intersect(region, whole) != region:
                    raise ValueError(
                        f"{names[0]}: rank {rank} names {slice_text(region)}, which is empty or"
                        f" outside of its shape {full}"
                    )
        for replica in self.replicas:
            wanted = [region for rank in replica if rank in targets for region in targets[rank]]
            if _covered(tuple(wanted)) == math.prod(full):
                continue
            lost = without(whole, wanted)
            raise ValueError(
                f"{names[0]}{slice_text(lost[0])} (and the same slices of {len(names) - 1} other"
                f" tensors) is held by the training ranks {sorted(sources)} but needed by none of"
                f" the rollout ranks {sorted(replica)}: its update would be lost. Correct the"
                " recorded layout"
            )

    def _bring(
        self,
        target: int,
        wanted: Sequence[Slice],
        ranks_with: Mapping[Slice, list[int]],
        names: tuple[str, ...],
        dtype: str,
    ) -> list[Delivery]:
        """Disjoint deliveries that cover the wanted slices, from the nearest sources."""
        missing: list[Slice] = []
        for region in wanted:  # what is wanted in two places travels once
            missing += without(region, missing)
        deliveries: list[Delivery] = []
        for link, region, ranks in self._by_distance(target, ranks_with):
            for wish in missing:
                common = intersect(wish, region)
                if common is not None:
                    size = math.prod(common.shape) * ITEMSIZE[dtype]
                    senders = self._share(ranks, target, link, size, len(names), dtype)
                    deliveries.append(Delivery(target, common, region, senders))
            missing = [rest for wish in missing for rest in subtract(wish, region)]
            if not missing:
                break
        if missing:
            others = sorted({rank for ranks in ranks_with.values() for rank in ranks})
            raise ValueError(
                f"{names[0]}{slice_text(missing[0])} (and the same slices of {len(names) - 1} other"
                f" tensors) is needed by rank {target} but held by no training rank; holders of"
                f" other parts: {others}. Correct the layout or map the missing parameter"
            )
        return deliveries

    def _by_distance(
        self, target: int, ranks_with: Mapping[Slice, list[int]]
    ) -> list[tuple[str, Slice, tuple[int, ...]]]:
        """``(link, shard, the ranks at that distance that have it)``, nearest first; each shard
        once, at its shortest distance."""
        by_link: dict[str, list[tuple[str, Slice, tuple[int, ...]]]] = {link: [] for link in LINKS}
        for region, ranks in ranks_with.items():
            at: dict[str, list[int]] = {link: [] for link in LINKS}
            for rank in ranks:
                at[self.link(rank, target)].append(rank)
            nearest = next(link for link in LINKS if at[link])
            by_link[nearest].append((nearest, region, tuple(at[nearest])))
        return [entry for link in LINKS for entry in by_link[link]]

    def _share(
        self, ranks: tuple[int, ...], target: int, link: str, size: int, count: int, dtype: str
    ) -> tuple[int, ...]:
        """The senders of ``count`` tensors, ``size`` bytes of each: least loaded first, each
        charged with its part."""
        self.bytes_by_link[link] += size * count
        if link == SAME_PROCESS:
            return ranks
        senders = sorted(ranks, key=lambda rank: (self.load[rank], rank))
        # Tensor i goes to sender i % len(senders), so the first ``more`` of them send one more.
        each, more = divmod(count, len(senders))
        for i, source in enumerate(senders):
            num_bytes = size * (each + (i < more))
            if num_bytes:
                self.load[source] += num_bytes
                self.streams[Stream(source, target, dtype)] += num_bytes
        return tuple(senders)


def _one_type(members: _Members) -> tuple[tuple[int, ...], str]:
    """Shape and dtype, in which all ranks must agree."""
    first = members.patterns[0]
    name = members.names[0]
    for pattern in members.patterns:
        if (pattern.full, pattern.dtype) != (first.full, first.dtype):
            side = "rollout" if pattern.is_target else "training"
            raise ValueError(
                f"{name}: rank {first.rank} has shape {first.full} and dtype {first.dtype}, rank"
                f" {pattern.rank} ({side}) has shape {pattern.full} and dtype {pattern.dtype}; make"
                " both sides agree (precision.params and rollout.dtype, vocabulary, model path)"
            )
    if first.dtype not in ITEMSIZE:
        raise ValueError(f"{name}: dtype {first.dtype!r} is not one of {sorted(ITEMSIZE)}")
    return first.full, first.dtype
