"""Which rank sends what: equal sources share the load, each receiver hears from few of them, and
ranks without training weights pass on what they get."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_rl.weight_sync.planner.nodes import FromNode, FromRemote, Nodes
from megatron_rl.weight_sync.planner.slices import Slice, split

Turns = range  # numbers of the tensors of a class


@dataclass(frozen=True, eq=False)
class Delivery:
    """One slice of several tensors of a class, from senders to first receivers.

    The n-th of the tensors goes to ``targets[i]`` from ``sources[i, n % k]``.
    """

    class_index: int
    region: Slice
    within: Slice  # the shard at the sender that ``region`` is a part of
    turns: Turns  # numbers of the tensors in their class
    # The places of the target's node that want it, its own among them; empty where it alone does.
    receivers: tuple[int, ...]
    targets: np.ndarray  # [targets]
    sources: np.ndarray  # [targets, k]


class Senders:
    """Chooses the senders of deliveries."""

    def __init__(self, nodes: Nodes, source_role: np.ndarray, target_role: np.ndarray) -> None:
        """``source_role``, ``target_role``: of each rank, -1 without one."""
        self.nodes = nodes
        self.next_node = _chains(nodes, source_role >= 0, target_role)
        # A node at the head of its chain (or in none): no other node passes on to it.
        self.is_head = np.ones(len(nodes.ranks), dtype=bool)
        self.is_head[self.next_node[self.next_node >= 0]] = False
        self.copy = _copies(source_role, target_role)

    def from_node(
        self, class_index: int, count: int, demand: FromNode, nodes: np.ndarray
    ) -> Delivery:
        """``count`` tensors to one place of each of the nodes: its holders take turns."""
        # Each place begins with another holder: of a class of one tensor the first one sends all.
        begin = demand.place % len(demand.holders)
        holders = demand.holders[begin:] + demand.holders[:begin]
        targets = self.nodes.ranks[nodes, demand.place]
        sources = self.nodes.ranks[nodes][:, holders[:count]]  # [nodes, holders]
        turns = range(count)
        return Delivery(class_index, demand.region, demand.within, turns, (), targets, sources)

    def from_remote(
        self,
        class_index: int,
        count: int,
        demand: FromRemote,
        nodes: np.ndarray,
        holders: np.ndarray,
    ) -> Iterator[Delivery]:
        """``count`` tensors once into each node, at the places that want them in turn. Only the
        first node of a chain hears from a source. ``holders``: the ranks that have the shard."""
        heads = nodes[self.is_head[nodes]]  # the others get it from the node before them
        if not len(heads):
            return
        receivers = demand.receivers if len(demand.receivers) > 1 else ()
        targets = self.nodes.ranks[heads][:, demand.receivers]
        # Targets are numbered in the order of their copies of the model, as holders are by their
        # ranks: a target hears from holders near it.
        numbers = np.empty(targets.size, dtype=np.int64)
        by_copy = np.argsort(self.copy[targets], axis=None, kind="stable")
        numbers[by_copy] = np.arange(targets.size)
        numbers = numbers.reshape(targets.shape)
        for i, region, turns in _shares(demand, count):
            own = holders
            if len(holders) <= targets.size:  # those at the place of the target in their nodes
                place = self.nodes.position
                on_rail = holders[place[holders] == place[targets[0, i]]]
                own = on_rail if len(on_rail) else holders
            # Holders for each target, its neighbors. Example: of a, b, c, d, each of two targets
            # hears from two, a, b and c, d; of eight, targets 0 and 1 hear from a, 2 and 3 from b.
            each = max(1, len(own) // targets.size)
            first = numbers[:, i] * len(own) // targets.size
            # Each place begins with another one, see ``from_node``.
            begin = demand.receivers[i] + np.arange(min(each, len(turns)))
            ends = (targets[:, i], own[first[:, None] + begin % each])
            yield Delivery(class_index, region, demand.within, turns, receivers, *ends)


def _shares(demand: FromRemote, count: int) -> Iterator[tuple[int, Slice, Turns]]:
    """``(number of the receiver, slice, tensors)``: its share of ``count`` tensors.

    Example: of five tensors and two receivers, receiver 0 has tensors 0 and 2 whole, receiver 1 has
    1 and 3, and each has one half of tensor 4.
    """
    num_receivers = len(demand.receivers)
    even = count - count % num_receivers
    # Fewer parts than receivers where the slice is too small.
    parts = split(demand.region, num_receivers) if even < count else []
    for i in range(num_receivers):
        if even:
            yield i, demand.region, range(i, even, num_receivers)
        if i < len(parts):
            yield i, parts[i], range(even, count)


def _copies(source_role: np.ndarray, target_role: np.ndarray) -> np.ndarray:
    """The number of each rank among those that have the same, or that have nothing and want the
    same: ranks of one number together have, or want, one copy of the model."""
    role = np.where(source_role >= 0, source_role, 1 + source_role.max(initial=0) + target_role)
    order = np.argsort(role, kind="stable")
    copy = np.empty(len(role), dtype=np.int64)
    copy[order] = np.arange(len(role)) - np.searchsorted(role[order], role[order])
    return copy


def _chains(nodes: Nodes, is_source: np.ndarray, target_role: np.ndarray) -> np.ndarray:
    """Node -> the node that it passes on to, -1 without one.

    Nodes without training weights that want the same form chains of neighbors. As many chains as
    the sources can feed at the rate at which a node takes: more would wait for the sources, fewer
    would be longer.
    """
    next_node = np.full(len(nodes.ranks), -1)
    # A place without a rank is -1, which would index the last rank.
    present = nodes.ranks >= 0
    held = is_source[nodes.ranks] & present
    roles = np.where(present, target_role[nodes.ranks], -1)
    pure = np.flatnonzero(~held.any(axis=1) & (roles >= 0).any(axis=1))
    num_ranks_pure = int(present[pure].sum())
    alike: dict[bytes, list[int]] = {}
    for node in pure:
        alike.setdefault(roles[node].tobytes(), []).append(int(node))
    for members in alike.values():
        # These nodes' part of the sources, in nodes: each of their ranks sends as fast as one
        # receives. Example: 32 sources for 16 nodes of 8 ranks feed 4 chains of 4 nodes.
        fed = int(is_source.sum()) * len(members) // num_ranks_pure
        for chain in np.array_split(members, min(max(1, fed), len(members))):
            # Each node passes on to the one after it; the last one keeps its -1.
            next_node[chain[:-1]] = chain[1:]
    return next_node
