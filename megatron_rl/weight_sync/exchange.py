"""The shards that every rank has and needs, sent to all: which rank has which role, then each role
once."""

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
    """One group of shards without its places: of which tensors, and its geometry."""

    names: tuple[str, ...]
    full: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def _encoded(groups: Groups) -> list[EncodedGroup]:
    shards = [group.shard for group in groups]
    return [
        EncodedGroup(group.names, shard.full, shard.start, shard.shape, shard.dtype)
        for group, shard in zip(groups, shards, strict=True)
    ]


def _decoded(message: Sequence[EncodedGroup]) -> list[ShardGroup]:
    return [
        ShardGroup(names, (), Shard("", full, start, shape, offset=0, stride=(), dtype=dtype))
        for names, full, start, shape, dtype in message
    ]


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
    roles: dict[str, Groups] = {"": ()}
    # The loops are the same on every rank, for all know all digests: so are the broadcasts.
    for side in (SOURCE, TARGET):
        for owner, digests in enumerate(everyone):
            if digests[side] not in roles:
                message = _encoded(own[side]) if rank == owner else None
                message = broadcast(message, list[EncodedGroup], owner, group)
                roles[digests[side]] = _decoded(message)
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
