"""Shards of one process, declared line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.shards import ShardGroup
from megatron_rl.weight_sync.planner.slices import Slice


def divide(what: str, size: int, by: str, parts: int) -> int:
    """``size / parts``. Raises ValueError naming both when it is not whole."""
    if size % parts:
        raise ValueError(
            f"{what}={size} does not divide by {by}={parts}; choose a {by} that divides it"
        )
    return size // parts


@cache
def full_names(prefixes: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    """The suffix behind each prefix. One tuple for all ranks that ask for the same names, which the
    planner then recognizes at once."""
    return tuple(prefix + suffix for prefix in prefixes)


def expand(groups: Iterable[ShardGroup]) -> list[Shard]:
    """The single shards of groups that know their places."""
    shards = []
    for group in groups:
        for name, key in zip(group.names, group.keys, strict=True):
            shards.append(replace(group.shard, name=name, key=key))
    return shards


def in_fused_tensors(groups: Iterable[ShardGroup], rows: Mapping[str, int]) -> list[ShardGroup]:
    """The groups for files that keep query, key and value in one tensor, and gate and up in one
    (Phi-3). ``rows``: how many each of q_proj, k_proj, v_proj, gate_proj and up_proj has."""
    places = {}  # of a part: the fused tensor, its rows, and those above the part
    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        total = sum(rows[part] for part in parts)
        for number, part in enumerate(parts):
            places[part] = (fused, total, sum(rows[above] for above in parts[:number]))
    found = []
    for group in groups:
        part = next((part for part in places if f".{part}." in group.names[0]), None)
        if part is None:
            found.append(group)
            continue
        fused, total, above = places[part]
        shard = replace(
            group.shard,
            full=(total, *group.shard.full[1:]),
            start=(above + group.shard.start[0], *group.shard.start[1:]),
        )
        names = tuple(name.replace(part, fused) for name in group.names)
        found.append(ShardGroup(names, group.keys, shard))
    return found


@dataclass
class ShardTable:
    """Shards of one process under construction. ``tensors`` and ``parameters`` are the name
    prefixes of a run of equal layers: every line of the table is one group of shards."""

    dtype: str
    groups: list[ShardGroup] = field(default_factory=list)
    tensors: tuple[str, ...] = ("",)
    parameters: tuple[str, ...] = ("",)
    renamed: tuple[tuple[str, str], ...] = ()  # parts of the names of parameters

    def rows(
        self, name: str, full: tuple[int, ...], first: int, count: int, key: str, at: int = 0
    ) -> None:
        """Rows ``[first, first + count)`` of the tensor are rows ``at`` and on of a parameter of
        equal width."""
        if count <= 0:
            return
        if len(full) == 1:  # of a vector: numbers
            self._add(name, key, full, Slice((first,), (count,)), at, (1,))
            return
        region = Slice((first, *(0 for _ in full[1:])), (count, *full[1:]))
        stride = tuple(math.prod(full[axis + 1 :]) for axis in range(len(full)))
        self._add(name, key, full, region, at * stride[0], stride)

    def columns(
        self, name: str, full: tuple[int, int], first: int, count: int, key: str, at: int = 0
    ) -> None:
        """Columns ``[first, first + count)`` of the tensor are a dense block from row ``at`` of a
        parameter ``count`` wide."""
        region = Slice((0, first), (full[0], count))
        self._add(name, key, full, region, at * count, (count, 1))

    def turned(
        self, name: str, full: tuple[int, int], region: Slice, key: str, at: int = 0
    ) -> None:
        """A region of the tensor is a dense block from number ``at`` of a parameter whose rows are
        the tensor's columns."""
        self._add(name, key, full, region, at, (1, region.shape[0]))

    def expert_vectors(self, name: str, width: int, region: Slice, key: str, experts: int) -> None:
        """A region of a tensor of ``experts`` rows is a parameter, dense from its start."""
        step = region.shape[1] if region.shape[0] > 1 else 1
        self._add(name, key, (experts, width), region, 0, (step, 1))

    def whole(self, name: str, full: tuple[int, ...], key: str) -> None:
        """The whole tensor is a parameter."""
        self.rows(name, full, 0, full[0], key)

    def _add(
        self,
        name: str,
        key: str,
        full: tuple[int, ...],
        region: Slice,
        offset: int,
        stride: tuple[int, ...],
    ) -> None:
        if self.tensors:
            for old, new in self.renamed:
                key = key.replace(old, new)
            names = full_names(self.tensors, name)
            keys = full_names(self.parameters, key)
            shard = Shard("", full, region.start, region.shape, offset, stride, dtype=self.dtype)
            self.groups.append(ShardGroup(names, keys, shard))
