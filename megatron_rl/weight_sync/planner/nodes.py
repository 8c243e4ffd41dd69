"""Which ranks share a node, and what the ranks of one node need from themselves, from each other,
and from other nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.slices import (
    Slice,
    common_parts,
    covered,
    each_inside,
    each_without,
    without,
)

Slices = tuple[Slice, ...]


@dataclass(frozen=True)
class Nodes:
    """The nodes of the ranks that take part."""

    of_rank: np.ndarray  # rank -> its node
    position: np.ndarray  # rank -> its place there
    ranks: np.ndarray  # (node, place) -> rank, -1 where there is none

    @staticmethod
    def of(taking_part: Iterable[int], node_of_rank: Sequence[int]) -> Nodes:
        """``node_of_rank``: any number for each rank, equal for those of one node.

        Example: ranks 0, 1, 3 and 4 of the nodes ``[5, 5, 7, 7, 7]`` have the nodes 0, 0, 1, 1 and
        the places 0, 1, 1, 2; ``ranks`` is ``[[0, 1, -1], [-1, 3, 4]]``.
        """
        part = np.array(sorted(taking_part), dtype=np.int64)
        labels = np.asarray(node_of_rank, dtype=np.int64)
        of_rank = np.full(len(labels), -1)
        position = np.full(len(labels), -1)
        _, of_rank[part] = np.unique(labels[part], return_inverse=True)
        # A place counts all ranks of a node, also idle ones: equal places are equal rails.
        order = np.argsort(labels, kind="stable")  # node after node, ranks in order within each
        first = np.flatnonzero(np.diff(labels[order], prepend=labels[order][:1] - 1))
        sizes = np.diff(np.append(first, len(order)))
        place = np.empty(len(labels), dtype=np.int64)
        place[order] = np.arange(len(order)) - np.repeat(first, sizes)
        position[part] = place[part]
        widest = int(sizes.max()) if len(sizes) else 0
        ranks = np.full((int(of_rank.max(initial=-1)) + 1, widest), -1)
        ranks[of_rank[part], position[part]] = part
        return Nodes(of_rank, position, ranks)

    def same(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.of_rank[a] == self.of_rank[b]


class FromNode(NamedTuple):
    """``region``, needed at ``place``, a part of the shard ``within`` at each of ``holders``: the
    place itself, which copies it, or others of the node."""

    place: int
    region: Slice
    within: Slice
    holders: tuple[int, ...]


class FromRemote(NamedTuple):
    """``region``, needed at each of ``receivers`` and held nowhere in the node: a part of the shard
    ``within`` of others."""

    region: Slice
    within: Slice
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class NodeDemand:
    """What the ranks of one node want of one tensor, by its nearest source."""

    from_node: tuple[FromNode, ...]
    from_remote: tuple[FromRemote, ...]
    missing: int  # elements needed and not held, summed over ranks
    entering: int  # elements needed on the node and held nowhere on it
    unavailable: tuple[int, Slice] | None  # a place and a slice that no rank has


@lru_cache(maxsize=65536)
def node_demand(held: tuple[Slices, ...], wanted: tuple[Slices, ...], shards: Slices) -> NodeDemand:
    """``held``, ``wanted``: of each place of the node; ``shards``: all that exist, anywhere.

    What is needed in two places of one rank travels once; what a rank has itself is copied; what a
    rank of the node has is taken from there; the rest crosses into the node once.

    Kept, since nodes and classes repeat; hence tuples all the way down, which can be hashed.
    """
    from_node = []
    left: list[list[Slice]] = []
    on_node = dict.fromkeys(chain.from_iterable(held))  # each shard once
    for place, wishes in enumerate(wanted):
        missing: list[Slice] = []
        for region in wishes:
            missing += without(region, missing)
        # Its own shards first, which travel nowhere.
        nearest: list[tuple[Slice, tuple[int, ...]]] = [(shard, (place,)) for shard in held[place]]
        for shard in on_node:
            mates = tuple(i for i, regions in enumerate(held) if shard in regions and i != place)
            if mates:
                nearest.append((shard, mates))
        for shard, holders in nearest:
            taken = each_inside(missing, shard)
            from_node += [FromNode(place, region, shard, holders) for region in taken]
            missing = each_without(missing, shard)
        left.append(missing)
    from_remote = []
    unavailable = None
    for part, receivers in common_parts(left):
        missing = [part]
        for shard in shards:
            regions = each_inside(missing, shard)
            from_remote += [FromRemote(region, shard, receivers) for region in regions]
            missing = each_without(missing, shard)
        if missing and unavailable is None:
            unavailable = (receivers[0], missing[0])
    # Counted from what is held and needed, not summed over the lists above: the plan is compared
    # with these bounds.
    places = zip(held, wanted, strict=True)
    missing_elements = sum(covered(wishes) - covered(wishes, own) for own, wishes in places)
    all_wishes = list(chain.from_iterable(wanted))
    entering = covered(all_wishes) - covered(all_wishes, list(on_node))
    return NodeDemand(tuple(from_node), tuple(from_remote), missing_elements, entering, unavailable)


def elements(region: Slice) -> int:
    return math.prod(region.shape)
