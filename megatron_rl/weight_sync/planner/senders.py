"""Which rank sends what: equal sources share the load, each taker hears from few of them, and ranks
without training weights pass on what they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_rl.weight_sync.planner.nodes import FromRemote, FromSameNode, Nodes, elements
from megatron_rl.weight_sync.planner.slices import Slice, split

Turns = range  # numbers of the tensors of a class


@dataclass(frozen=True, eq=False)
class Delivery:
    """One slice of several tensors of a class, from senders to first receivers.

    The n-th of the tensors goes to ``targets[i]`` from ``sources[i, n % k]``.

    Attributes:
        turns: numbers of the tensors in their class.
        within: the shard at the sender that ``region`` is a part of.
        receivers: the places of the target's node that want it, the target's own among them; empty
            where it alone does.
    """

    class_index: int
    region: Slice
    within: Slice
    turns: Turns
    receivers: tuple[int, ...]
    targets: np.ndarray  # [targets]
    sources: np.ndarray  # [targets, k]


@dataclass(frozen=True)
class Wanted:
    """What a class is to be delivered: its number, how many tensors it has, bytes of one
    element, and slice -> the ranks that hold it."""

    class_index: int
    count: int
    itemsize: int
    holders: dict[Slice, np.ndarray]


class Senders:
    """Chooses senders, delivery after delivery, and keeps the load of each."""

    def __init__(
        self, nodes: Nodes, source_role: np.ndarray, target_role: np.ndarray, kind: np.ndarray
    ) -> None:
        """``source_role``, ``target_role``: of each rank, -1 without one. ``kind``: of each node,
        equal where the same roles stand at the same places."""
        num_ranks = len(source_role)
        self.nodes = nodes
        self.load = np.zeros(num_ranks, dtype=np.int64)  # bytes that each rank sends
        self.is_source = source_role >= 0
        self.cell, self.num_cells = _cells(source_role)
        self.next_node = _chains(nodes, self.is_source, target_role)
        # A node at the head of its chain (or in none): no other node passes on to it.
        self.is_head = np.ones(len(nodes.ranks), dtype=bool)
        self.is_head[self.next_node[self.next_node >= 0]] = False
        self.num_groups, self.group = self._groups(target_role, kind)

    def _groups(self, target_role: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(number of groups, own group)`` of each rank that hears from sources: the cells stand
        in that many groups of neighbors, and it hears from its own.

        Ranks that want the same and whose nodes lack the same are spread evenly over the cells,
        each near its own cell. Fewer of them than cells hear from several cells each.

        Example: of 4 cells, 2 such ranks hear from 2 groups of 2 cells, 8 such ranks from 4 groups
        of one cell, two ranks a group.
        """
        num_groups = np.ones(len(target_role), dtype=np.int64)
        group = np.zeros(len(target_role), dtype=np.int64)
        part = np.flatnonzero(self.nodes.of_rank >= 0)
        hears = part[self.is_head[self.nodes.of_rank[part]] & (target_role[part] >= 0)]
        kind_of = kind[self.nodes.of_rank[hears]]
        # The pair (role, kind) as one number.
        alike = target_role[hears] * (1 + kind.max(initial=0)) + kind_of
        for number in np.unique(alike):
            receivers = hears[alike == number]
            # In the order of their cells, then cut into as many runs as there are groups: a rank
            # hears from cells near its own.
            receivers = receivers[np.argsort(self.cell[receivers], kind="stable")]
            num_groups[receivers] = min(self.num_cells, len(receivers))
            group[receivers] = np.arange(len(receivers)) * num_groups[receivers] // len(receivers)
        return num_groups, group

    def from_same_node(self, want: Wanted, demand: FromSameNode, nodes: np.ndarray) -> Delivery:
        """All holders of the node take turns, least loaded first."""
        # Targets are [nodes], sources [nodes, holders]: every rank of the same node that has it.
        targets = self.nodes.ranks[nodes, demand.place]
        sources = self.nodes.ranks[nodes][:, list(demand.holders)]
        order = np.argsort(self.load[sources], axis=1, kind="stable")
        # Where there are fewer tensors than holders, the first ones send.
        sources = np.take_along_axis(sources, order, axis=1)[:, : want.count]
        delivery = Delivery(
            want.class_index, demand.region, demand.within, range(want.count), (), targets, sources
        )
        self._charge(delivery, want.itemsize)
        return delivery

    def from_remote(
        self, want: Wanted, demand: FromRemote, nodes: np.ndarray
    ) -> Iterator[Delivery]:
        """Once into each node, at the places that want it in turn: tensors as far as they divide
        evenly, then parts of the others. Only the first node of a chain hears from a source."""
        heads = nodes[self.is_head[nodes]]  # the others get it from the node before them
        receivers = demand.receivers if len(demand.receivers) > 1 else ()
        for place, region, turns in _shares(demand, want.count):
            ranks = self.nodes.ranks[heads, place]
            for num_groups in np.unique(self.num_groups[ranks]):
                targets = ranks[self.num_groups[ranks] == num_groups]
                # Where there are fewer tensors than senders, the first ones send.
                sources = self._choose(want.holders[demand.within], targets)[:, : len(turns)]
                delivery = Delivery(
                    want.class_index, region, demand.within, turns, receivers, targets, sources
                )
                self._charge(delivery, want.itemsize)
                yield delivery

    def _charge(self, delivery: Delivery, itemsize: int) -> None:
        size = itemsize * elements(delivery.region)
        each = delivery.sources.shape[1]
        for n in range(each):
            num_tensors = len(delivery.turns[n::each])  # sources take turns, see Delivery
            # A rank may be the source of several targets; ``+=`` would count it once.
            np.add.at(self.load, delivery.sources[:, n], size * num_tensors)

    def _choose(self, holders: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """[targets, k]: the senders of each target, which all stand at one place of their nodes and
        have one number of groups.

        Where a group has more targets than holders, holders on the rail of the targets come first,
        and targets take turns at the least loaded; where it has more holders, each target hears
        from several.

        Example of one group, with holders a, b, c, d from the least loaded on: targets 0 and 1 hear
        from a, b and from c, d; of five targets 0 to 4 each hears from one, a, b, c, d, a.
        """
        num_groups = int(self.num_groups[targets[0]])
        group = self.group[targets]
        # [ranks]: the group of neighboring cells that the cell of a holder is in.
        held_in = self.cell * num_groups // self.num_cells
        # [groups]: how many targets hear from each, and how many holders it has.
        wanted = np.bincount(group, minlength=num_groups)
        held = np.bincount(held_in[holders], minlength=num_groups)
        if (
            held[wanted > 0] == 0
        ).any():  # copies are not even: every rank may receive from every holder
            group = np.zeros_like(group)
            held_in = np.zeros_like(held_in)
            wanted = np.array([len(targets)])
            held = np.array([len(holders)])
        used = wanted > 0
        # Holders for each target: one number for all groups, since it is a width of the answer.
        each = int((held[used] // wanted[used]).min())
        if each <= 1:
            # Senders are scarce. Those on the rail will do where every group that is heard has one
            # there.
            place = self.nodes.position[targets[0]]
            on_rail = holders[self.nodes.position[holders] == place]
            held_on_rail = np.bincount(held_in[on_rail], minlength=len(held))
            if (held_on_rail[used] > 0).all():
                holders = on_rail
                held = held_on_rail
        each = max(1, each)
        # Group after group (lexsort: the last key counts first), in each the least loaded first.
        order = np.lexsort((holders, self.load[holders], held_in[holders]))
        holders = holders[order]
        first = np.cumsum(held) - held  # of each group, among the holders
        # The number of each target among those of its group.
        by_group = np.argsort(group, kind="stable")
        first_target = np.cumsum(wanted) - wanted
        turn = np.empty(len(targets), dtype=np.int64)
        turn[by_group] = np.arange(len(targets)) - np.repeat(first_target, wanted)
        # [targets, each]: numbers among the holders of the group, which begin again where they run
        # out.
        among = turn[:, None] * each + np.arange(each)
        return holders[first[group][:, None] + among % held[group][:, None]]


def _shares(demand: FromRemote, count: int) -> Iterator[tuple[int, Slice, Turns]]:
    """``(place, slice, tensors)``: the share of each place that needs ``count`` tensors.

    Example: of five tensors and the receivers 0 and 3, place 0 has tensors 0 and 2 whole, place 3
    has 1 and 3, and each has one half of tensor 4.
    """
    num_takers = len(demand.receivers)
    even = count - count % num_takers
    parts: list[Slice] = []
    if even < count:
        parts = split(demand.region, num_takers)  # fewer where the slice is too small
    for i, place in enumerate(demand.receivers):
        if even:
            yield place, demand.region, range(i, even, num_takers)
        if i < len(parts):
            yield place, parts[i], range(even, count)


def _cells(source_role: np.ndarray) -> tuple[np.ndarray, int]:
    """``(cell of each rank, number of cells)``: a cell has one rank of every role, so it holds a
    whole model. Copies of a role that are too many are dealt out again."""
    cell = np.zeros(len(source_role), dtype=np.int64)
    sources = np.flatnonzero(source_role >= 0)
    if not len(sources):
        return cell, 1
    counts = np.bincount(source_role[sources])
    num_cells = int(counts.min())
    by_role = sources[np.argsort(source_role[sources], kind="stable")]
    # The number of each rank among those of its role. A role of which there are more ranks than
    # cells begins with the first cell again.
    first_of_role = np.cumsum(counts) - counts
    cell[by_role] = np.arange(len(by_role)) - np.repeat(first_of_role, counts)
    cell[sources] %= num_cells
    return cell, num_cells


def _chains(nodes: Nodes, is_source: np.ndarray, target_role: np.ndarray) -> np.ndarray:
    """Node -> the node that it passes on to, -1 without one.

    Nodes without training weights that want the same form chains of neighbors. As many chains as
    the sources can feed at the rate at which a node takes: more would wait for the sources, fewer
    would be longer.
    """
    next_node = np.full(len(nodes.ranks), -1)
    if not len(nodes.ranks):
        return next_node
    present = nodes.ranks >= 0
    # A place without a rank is -1, which would index the last rank.
    held = is_source[nodes.ranks] & present
    roles = np.where(present, target_role[nodes.ranks], -1)
    pure = np.flatnonzero(~held.any(axis=1) & (roles >= 0).any(axis=1))
    num_ranks_pure = int(present[pure].sum())
    num_sources = int(is_source.sum())
    alike: dict[bytes, list[int]] = {}
    for node in pure:
        alike.setdefault(roles[node].tobytes(), []).append(int(node))
    for members in alike.values():
        # These nodes' part of the sources, in nodes: each of their ranks sends as fast as one
        # receives. Example: 32 sources for 16 nodes of 8 ranks feed 4 chains of 4 nodes.
        fed = num_sources * len(members) // max(1, num_ranks_pure)
        num_chains = min(max(1, fed), len(members))
        for chain in np.array_split(members, num_chains):
            # Each node passes on to the one after it; the last one keeps its -1.
            next_node[chain[:-1]] = chain[1:]
    return next_node
