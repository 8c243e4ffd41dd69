"""Shards of many tensors that lie alike, and the strided views of parameters that they live in."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.slices import Slice, slice_text

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


class View(NamedTuple):
    """A strided view of a local parameter, in elements; ``offset`` from its own first element."""

    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ShardGroup:
    """Shards that differ in nothing but their names: shard i is ``shard`` with ``names[i]`` and
    ``keys[i]``. ``keys`` is empty where only the geometry is known (of other processes).

    Grouped, the layers of a model are planned, and sent to the other processes, at once.

    Example: ``ShardGroup(("a.0", "a.1"), ("p.0", "p.1"), Shard("", (4, 4), (0, 0), (2, 4), 0,
    (4, 1), dtype="float32"))``.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    shard: Shard

    @property
    def region(self) -> Slice:
        return Slice(self.shard.start, self.shard.shape)


def apart(shard: Shard) -> Iterator[Shard]:
    """A tensor of three axes, the experts of a layer, as one of each: a plan takes time with the
    square of the parts of a tensor."""
    if len(shard.full) != 3 or shard.full[1] == 1:  # filters of a delta net stay together
        yield shard
        return
    start, shape, stride = shard.start, shard.shape, shard.stride
    cut = replace(shard, full=shard.full[1:], start=start[1:], shape=shape[1:], stride=stride[1:])
    for i in range(shape[0]):
        offset = shard.offset + i * stride[0]
        yield replace(cut, name=f"{shard.name}[{start[0] + i}]", offset=offset)


def count_tensors(names: Iterable[str]) -> int:
    """How many tensors these are before ``collect`` takes experts apart."""
    return len({name.partition("[")[0] for name in names})


def collect(shards: Iterable[Shard]) -> list[ShardGroup]:
    """The shards in groups, in order of first appearance.

    Experts of one tensor are tensors of their own: ``w[5]`` of shape (4, 6) is the last one of a
    ``w`` of (6, 4, 6).
    """
    names: dict[Shard, list[str]] = defaultdict(list)
    keys: dict[Shard, list[str]] = defaultdict(list)
    for shard in chain.from_iterable(map(apart, shards)):
        common = replace(shard, name="", key="")
        names[common].append(shard.name)
        keys[common].append(shard.key)
    return [ShardGroup(tuple(names[common]), tuple(keys[common]), common) for common in names]


def subview(group: ShardGroup, index: int, region: Slice) -> View:
    """The view of ``region``, a part of the shard, in the parameter ``group.keys[index]``."""
    shard = group.shard
    offset = shard.offset
    for first, shard_first, step in zip(region.start, shard.start, shard.stride, strict=True):
        offset += (first - shard_first) * step
    return View(group.keys[index], offset, region.shape, shard.stride)


def extent(shard: Shard) -> int:
    """Elements of the parameter from its first one to the last one that the shard touches.

    Example: shape (2, 4), stride (8, 1) from offset 16 touch 16 to 19 and 24 to 27; extent 28.
    """
    steps = zip(shard.shape, shard.stride, strict=True)
    return shard.offset + sum((size - 1) * step for size, step in steps) + 1


def runs(shard: Shard) -> tuple[np.ndarray, int]:
    """``(starts, length)``: the runs of consecutive elements that make up the shard in its
    parameter, all of one length.

    Example: shape (2, 4), stride (8, 1) from offset 16 are ``([16, 24], 4)``; with stride (4, 1)
    the rows touch, ``([16], 8)``.
    """
    # An axis of size 1 is never stepped along; its stride may be anything.
    dims = [(step, size) for size, step in zip(shard.shape, shard.stride, strict=True) if size > 1]
    dims.sort(reverse=True)
    # From the innermost axis outwards, an axis whose step is the length so far continues the run.
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([shard.offset], dtype=np.int64)
    for step, size in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return starts, length


class _WrittenShard(NamedTuple):
    """The tensor ``name`` of a group, as it is written to a parameter."""

    group: ShardGroup
    name: str

    def __str__(self) -> str:
        return self.name + slice_text(self.group.region)


def check_written_once(rank: int, targets: Sequence[ShardGroup]) -> None:
    """Raises ValueError when two shards of a process land on one element of a parameter."""
    by_keys: dict[tuple[str, ...], list[ShardGroup]] = defaultdict(list)
    for group in targets:
        if group.keys:
            by_keys[group.keys].append(group)
    distinct = set().union(*by_keys)
    # Where groups name either the same parameters or none in common, their first parameters stand
    # for all the others; else every parameter is looked at by itself.
    if sum(len(keys) for keys in by_keys) == len(distinct):
        for keys, groups in by_keys.items():
            writers = [_WrittenShard(group, group.names[0]) for group in groups]
            _check_parameter(rank, keys[0], writers)
        return
    by_key: dict[str, list[_WrittenShard]] = defaultdict(list)
    for keys, groups in by_keys.items():
        for index, key in enumerate(keys):
            by_key[key] += [_WrittenShard(group, group.names[index]) for group in groups]
    for key, writers in by_key.items():
        _check_parameter(rank, key, writers)


def _check_parameter(rank: int, key: str, writers: Sequence[_WrittenShard]) -> None:
    """Sorted by their first elements, each run must end before the next one starts.

    Neighbors are enough: a run that reaches into a later one reaches into the next one, too.
    """
    starts_of = []
    ends_of = []
    for writer in writers:
        first, length = runs(writer.group.shard)
        starts_of.append(first)
        ends_of.append(first + length)
    starts = np.concatenate(starts_of)
    ends = np.concatenate(ends_of)
    owner = np.repeat(np.arange(len(writers)), [len(first) for first in starts_of])
    order = np.argsort(starts, kind="stable")
    clashes = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if len(clashes):
        before = order[clashes[0]]
        behind = order[clashes[0] + 1]
        raise ValueError(
            f"rank {rank}: element {starts[behind]} of parameter {key!r} would be written twice,"
            f" by {writers[owner[before]]} and by {writers[owner[behind]]}; give every shard a"
            " place of its own"
        )
