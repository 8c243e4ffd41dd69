"""The shards that every rank has and needs, sent to all: which rank has which role, then each role
once, with each tensor's name once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
import xxhash

from megatron_rl.types import Shard
from megatron_rl.weight_sync.collectives import all_gather, broadcast
from megatron_rl.weight_sync.planner.shards import ShardGroup

Groups = Sequence[ShardGroup]
# Sides, as indices.
SOURCE = 0
TARGET = 1


class EncodedGroup(NamedTuple):
    """One group of shards: of which group of tensors, and its geometry."""

    column: int
    full: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class EncodedGroups(NamedTuple):
    """Shards without their places, as a message: names that were not sent before, groups of
    tensors as numbers among all names sent so far, and the groups of shards."""

    new_names: list[str]
    columns: list[list[int]]
    rows: list[EncodedGroup]


class NameTable:
    """The names sent so far, in the same order on every rank."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}

    def encode(self, groups: Groups) -> EncodedGroups:
        """What another rank needs to build the groups again."""
        # Groups that are other slices of the same tensors have the same names: each tuple of names
        # is sent once, as numbers.
        columns: dict[tuple[str, ...], int] = {}
        # ``decode`` gives new names their numbers, on every rank; this rank numbers them in the
        # same way, and remembers nothing.
        numbers = dict(self.numbers)
        new_names = []
        for group in groups:
            columns.setdefault(group.names, len(columns))
        for names in columns:
            for name in names:
                if name not in numbers:
                    numbers[name] = len(numbers)
                    new_names.append(name)
        lists = [[numbers[name] for name in names] for names in columns]
        rows = []
        for group in groups:
            shard = group.shard
            column = columns[group.names]
            rows.append(EncodedGroup(column, shard.full, shard.start, shard.shape, shard.dtype))
        return EncodedGroups(new_names, lists, rows)

    def decode(self, message: EncodedGroups) -> list[ShardGroup]:
        """The groups, without their places; remembers the new names."""
        for name in message.new_names:
            self.numbers[name] = len(self.names)
            self.names.append(name)
        columns = [tuple(self.names[i] for i in column) for column in message.columns]
        groups = []
        for column, full, start, shape, dtype in message.rows:
            geometry = Shard("", full, start, shape, offset=0, stride=(), dtype=dtype)
            groups.append(ShardGroup(columns[column], (), geometry))
        return groups


def digest(groups: Groups) -> str:
    """Equal for equal shards, wherever they lie; empty for none."""
    if not groups:
        return ""
    geometry = [
        (group.names, group.shard.full, group.region, group.shard.dtype) for group in groups
    ]
    return xxhash.xxh3_128_hexdigest(repr(geometry).encode())


def exchange(
    sources: Groups, targets: Groups, group: dist.ProcessGroup | None = None
) -> tuple[dict[int, Groups], dict[int, Groups]]:
    """Collective: ``(sources, targets)`` of every rank that has such, geometry only but for the
    caller's own. Ranks of one role share one sequence of groups."""
    own = (sources, targets)
    rank = dist.get_rank(group)
    everyone = all_gather([digest(groups) for groups in own], list[str], group)
    names = NameTable()
    roles: dict[str, Groups] = {"": ()}
    # The loops are the same on every rank, for all know all digests: so are the broadcasts.
    # Targets first: each of them names nearly all tensors, so the others only count them.
    for side in (TARGET, SOURCE):
        for owner, digests in enumerate(everyone):
            if digests[side] in roles:
                continue
            message = None
            if rank == owner:
                message = names.encode(own[side])
            message = broadcast(message, EncodedGroups, owner, group)
            roles[digests[side]] = names.decode(message)
    all_sources: dict[int, Groups] = {}
    all_targets: dict[int, Groups] = {}
    for number, digests in enumerate(everyone):
        if digests[SOURCE]:
            all_sources[number] = roles[digests[SOURCE]]
        if digests[TARGET]:
            all_targets[number] = roles[digests[TARGET]]
    # Its own with their places, which the others need not know.
    if sources:
        all_sources[rank] = list(sources)
    if targets:
        all_targets[rank] = list(targets)
    return all_sources, all_targets
