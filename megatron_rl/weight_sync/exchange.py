"""What every rank has and wants, made known to all: who plays which role, then each role once, with
each tensor's name once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
import xxhash

from megatron_rl.types import Shard
from megatron_rl.weight_sync.collectives import all_gather, broadcast
from megatron_rl.weight_sync.shards import ShardGroup

Groups = Sequence[ShardGroup]


class DescribedGroup(NamedTuple):
    """One group of shards: of which group of tensors, and its geometry."""

    column: int
    full: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class Described(NamedTuple):
    """Shards without their places, as a message: names that nobody has told before, groups of
    tensors as numbers among all names told so far, and the groups of shards."""

    new_names: list[str]
    columns: list[list[int]]
    rows: list[DescribedGroup]


class Names:
    """The names told so far; every rank hears them in the same order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}

    def describe(self, groups: Groups) -> Described:
        """What another rank needs to build the groups again."""
        columns = {names: i for i, names in enumerate(dict.fromkeys(g.names for g in groups))}
        each = dict.fromkeys(name for names in columns for name in names)
        new_names = [name for name in each if name not in self.numbers]
        numbers = self.numbers | {name: len(self.names) + i for i, name in enumerate(new_names)}
        lists = [[numbers[name] for name in names] for names in columns]
        rows = [
            DescribedGroup(columns[group.names], group.shard.full, *group.rect, group.shard.dtype)
            for group in groups
        ]
        return Described(new_names, lists, rows)

    def understand(self, described: Described) -> list[ShardGroup]:
        """The groups, without their places; remembers the new names."""
        for name in described.new_names:
            self.numbers[name] = len(self.names)
            self.names.append(name)
        columns = [tuple(self.names[i] for i in column) for column in described.columns]
        return [
            ShardGroup(columns[column], (), Shard("", full, start, shape, 0, (), dtype=dtype))
            for column, full, start, shape, dtype in described.rows
        ]


def digest(groups: Groups) -> str:
    """Equal for equal shards, wherever they lie; empty for none."""
    if not groups:
        return ""
    geometry = [(group.names, group.shard.full, group.rect, group.shard.dtype) for group in groups]
    return xxhash.xxh3_128_hexdigest(repr(geometry).encode())


def exchange(
    sources: Groups, targets: Groups, group: dist.ProcessGroup | None = None
) -> tuple[dict[int, Groups], dict[int, Groups]]:
    """Collective: ``(sources, targets)`` of every rank that has such, geometry only but for the
    caller's own. Ranks of one role share one sequence of groups."""
    own = (sources, targets)
    rank = dist.get_rank(group)
    everyone = all_gather([digest(groups) for groups in own], list[str], group)
    names = Names()
    roles: dict[str, Groups] = {"": ()}
    # Targets first: each of them names nearly all tensors, so the others only count them.
    for side in (1, 0):
        for owner, digests in enumerate(everyone):
            if digests[side] not in roles:
                described = names.describe(own[side]) if rank == owner else None
                roles[digests[side]] = names.understand(
                    broadcast(described, Described, owner, group)
                )
    all_sources, all_targets = (
        {i: roles[digests[side]] for i, digests in enumerate(everyone) if digests[side]}
        for side in (0, 1)
    )
    if sources:
        all_sources[rank] = list(sources)
    if targets:
        all_targets[rank] = list(targets)
    return all_sources, all_targets
