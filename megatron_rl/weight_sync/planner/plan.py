"""The plan of a weight sync: who sends what to whom, a pure function of the shards that every
process has and needs.

Tensors that the same ranks have and want in the same way form one class, nodes whose ranks have and
want the same of a class are alike, and both are planned once: the cost depends on the number of
kinds of tensors and of nodes, not on their number. No weight is allocated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from megatron_rl.weight_sync.planner.flows import LINKS, SAME_PROCESS, Flows, Part, Stream, gathered
from megatron_rl.weight_sync.planner.nodes import NodeDemand, Nodes, Slices, elements, node_demand
from megatron_rl.weight_sync.planner.roles import Roles, Side, TensorClass, roles_of, tensor_classes
from megatron_rl.weight_sync.planner.schedule import Schedule, schedule
from megatron_rl.weight_sync.planner.senders import Delivery, Senders, Wanted
from megatron_rl.weight_sync.planner.shards import check_written_once
from megatron_rl.weight_sync.planner.slices import Slice, covered, intersect, slice_text, without


@dataclass(frozen=True)
class Plan:
    """The deliveries, their flows and buckets, and their cost in bytes.

    Attributes:
        deliveries: each with the flow of every entry of its ``sources``; None for local copies.
        bytes_by_link: same_process, same_node, across_nodes.
        lower_bound: bytes that a process needs and does not have, each counted once per process,
            summed over processes; no plan can send less.
        node_bound: bytes that are needed on a node and that no process of it has, each counted once
            per node; no plan can send less across nodes.
        gather_bytes: what arrives when every rollout process receives every tensor whole.
    """

    classes: tuple[TensorClass, ...]
    deliveries: tuple[tuple[Delivery, np.ndarray | None], ...]
    schedule: Schedule
    bytes_by_link: Mapping[str, int]
    lower_bound: int
    node_bound: int
    gather_bytes: int

    @property
    def flows(self) -> Flows:
        return self.schedule.flows

    @property
    def streams(self) -> Mapping[Stream, int]:
        """Bytes between each two ranks that exchange any."""
        return self.flows.streams

    @property
    def bytes_local(self) -> int:
        return self.bytes_by_link[SAME_PROCESS]

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_by_link.values()) - self.bytes_local

    @property
    def ratio(self) -> float:
        """``bytes_sent / lower_bound``; 1 when there is nothing to send and nothing is sent."""
        return _ratio(self.bytes_sent, self.lower_bound)

    @property
    def node_ratio(self) -> float:
        """Bytes across nodes / ``node_bound``, likewise."""
        return _ratio(self.bytes_by_link["across_nodes"], self.node_bound)


def _ratio(sent: int, least: int) -> float:
    if least == 0:
        return float(sent + 1)  # 1 for nothing, and above 1 for anything
    return sent / least


@dataclass(frozen=True)
class Machines:
    """Which ranks share a node: ``rank // gpus_per_node``, or ``node_of_rank`` where it is given
    (any number for each rank). Example: ``Machines(gpus_per_node=8)``."""

    gpus_per_node: int = 1
    node_of_rank: tuple[int, ...] | None = None

    def nodes(self, taking_part: Collection[int]) -> Nodes:
        """Raises ValueError for sizes that cannot be."""
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node={self.gpus_per_node}: need at least 1")
        if self.node_of_rank is not None:
            return Nodes.of(taking_part, self.node_of_rank)
        num_ranks = 1 + max(taking_part, default=-1)
        return Nodes.of(taking_part, [rank // self.gpus_per_node for rank in range(num_ranks)])


@dataclass(frozen=True)
class PlanSettings:
    """What a plan follows from besides the shards.

    Attributes:
        bucket_bytes, rounds_in_flight: see ``schedule``.
        machines: which ranks share a node.
        replicas: groups of ranks that must together want every element of every tensor (None: all
            ranks that need anything are one).
        cast: floating types may differ, values are cast before they are sent.
    """

    bucket_bytes: int
    rounds_in_flight: int = 2
    machines: Machines = Machines()
    replicas: Sequence[Sequence[int]] | None = None
    cast: bool = False


def make_plan(sources: Side, targets: Side, settings: PlanSettings) -> Plan:
    """The plan that brings every target shard to its process: from itself if it has it, else from
    its node, else from anywhere, once into each node; among equal sources the senders share the
    load.

    ``sources``, ``targets``: what each rank has, and needs. Deterministic: equal inputs give equal
    plans on every rank.

    Raises ValueError, naming tensor, ranks and slices, for a tensor or an element without holder or
    without receiver, for a shape or dtype that differs, and for an element of a parameter that
    would be written twice.
    """
    nodes = settings.machines.nodes({*sources, *targets})
    looked_at = set()  # ranks of one role share a sequence: once is enough
    for rank in sorted(targets):
        if id(targets[rank]) not in looked_at:
            check_written_once(rank, targets[rank])
            looked_at.add(id(targets[rank]))
    replicas = settings.replicas
    if replicas is None:
        replicas = [sorted(targets)]
    sides = (roles_of(sources), roles_of(targets))
    planner = _Planner(sides, nodes, replicas)
    classes = tuple(tensor_classes(*sides, settings.cast))
    for number, tensors in enumerate(classes):
        planner.solve(number, tensors)
    # Along its chain a node passes a bucket on as many rounds later as are in flight: by then the
    # transport has finished the round that brought it, and need not wait for it out of turn.
    deliveries, flows = planner.flows(settings.rounds_in_flight)
    bytes_by_link = {SAME_PROCESS: planner.local_bytes, **flows.bytes_by_link()}
    plan = Plan(
        classes,
        deliveries,
        schedule(flows, settings.bucket_bytes, settings.rounds_in_flight),
        {link: bytes_by_link[link] for link in LINKS},
        planner.lower_bound,
        planner.node_bound,
        planner.gather_bytes,
    )
    assert plan.ratio == 1.0, (
        f"the plan sends {plan.bytes_sent} bytes where {plan.lower_bound} are needed"
    )
    assert plan.node_ratio == 1.0, (
        f"the plan sends {plan.bytes_by_link} bytes where {plan.node_bound} must enter nodes"
    )
    return plan


# Many classes have the same few sets of slices.
_covered = lru_cache(maxsize=65536)(covered)


class _Planner:
    """Plans class after class, and keeps the cost so far."""

    def __init__(
        self,
        sides: tuple[Roles, Roles],
        nodes: Nodes,
        replicas: Sequence[Sequence[int]],
    ) -> None:
        self.sides = sides
        self.nodes = nodes
        num_ranks = len(nodes.of_rank)
        self.source_role = sides[0].of_ranks(num_ranks)
        self.target_role = sides[1].of_ranks(num_ranks)
        # Each kind of replica, once: the roles of its ranks -> the ranks of the first such.
        self.replicas: dict[tuple[int, ...], list[int]] = {}
        for replica in replicas:
            roles = tuple(int(self.target_role[rank]) for rank in replica)
            self.replicas.setdefault(roles, sorted(replica))
        # Source role + 1 -> how many ranks of it are in replicas; at 0 those without source role.
        # What each of them has itself need not be gathered, see ``solve``.
        in_replicas = list(chain.from_iterable(replicas))
        num_roles = len(sides[0].ranks)
        self.gathering = np.bincount(self.source_role[in_replicas] + 1, minlength=num_roles + 1)
        # Each kind of node, once: the source roles at its places, then the target roles. A place
        # without a rank is -1, which would index the last rank.
        present = nodes.ranks >= 0
        held = np.where(present, self.source_role[nodes.ranks], -1)
        wanted = np.where(present, self.target_role[nodes.ranks], -1)
        places = np.concatenate([held, wanted], axis=1)
        self.kinds, kind_of = np.unique(places, axis=0, return_inverse=True)
        self.senders = Senders(nodes, self.source_role, self.target_role, kind_of)
        self.nodes_of_kind = [np.flatnonzero(kind_of == i) for i in range(len(self.kinds))]
        self.deliveries: list[tuple[Delivery, str, int]] = []  # with dtype, bytes of one tensor
        self.local: list[Delivery] = []
        self.local_bytes = 0
        self.lower_bound = 0
        self.node_bound = 0
        self.gather_bytes = 0

    def solve(self, number: int, tensors: TensorClass) -> None:
        """The deliveries of one class."""
        self._check_wanted(tensors)
        if not tensors.targets:
            return
        # Bytes of one element in all tensors of the class.
        size = tensors.itemsize * len(tensors.names)
        whole = math.prod(tensors.full)
        # Whole tensors to every rank of a replica, less what such a rank has itself.
        self.gather_bytes += size * whole * int(self.gathering.sum())
        for role, regions in tensors.sources.items():
            self.gather_bytes -= size * _covered(regions) * int(self.gathering[role + 1])
        ranks_of: dict[Slice, list[int]] = defaultdict(list)
        for role, regions in tensors.sources.items():
            for region in dict.fromkeys(regions):
                ranks_of[region] += self.sides[0].ranks[role]
        holders = {region: np.array(sorted(ranks)) for region, ranks in ranks_of.items()}
        # In the order of their first holders: the same on every rank, as all of a plan must be.
        shards = tuple(sorted(holders, key=lambda region: holders[region][0]))
        want = Wanted(number, len(tensors.names), tensors.itemsize, holders)
        for (held, wanted), nodes in self._alike(tensors).items():
            demand = node_demand(held, wanted, shards)
            if demand.unavailable is not None:
                self._raise_unavailable(tensors, demand.unavailable, nodes, holders)
            # ``node_demand`` counts elements of one tensor, on one of these nodes.
            self.lower_bound += size * demand.missing * len(nodes)
            self.node_bound += size * demand.entering * len(nodes)
            self._deliver(want, tensors, demand, nodes)

    def _alike(self, tensors: TensorClass) -> dict[tuple[tuple[Slices, ...], ...], np.ndarray]:
        """``(held, wanted)`` at each place of a node -> the nodes where it is so."""
        num_places = self.kinds.shape[1] // 2
        kinds: dict[tuple[tuple[Slices, ...], ...], list[int]] = defaultdict(list)
        for kind, roles in enumerate(self.kinds.tolist()):
            held = tuple(tensors.sources.get(role, ()) for role in roles[:num_places])
            wanted = tuple(tensors.targets.get(role, ()) for role in roles[num_places:])
            if any(wanted):
                kinds[held, wanted].append(kind)
        nodes = {}
        for pattern, alike in kinds.items():
            of_each = [self.nodes_of_kind[kind] for kind in alike]
            nodes[pattern] = np.sort(np.concatenate(of_each))
        return nodes

    def _deliver(
        self, want: Wanted, tensors: TensorClass, demand: NodeDemand, nodes: np.ndarray
    ) -> None:
        every_tensor = range(want.count)
        for place, region, within in demand.local:
            ranks = self.nodes.ranks[nodes, place]
            self.local_bytes += want.itemsize * elements(region) * want.count * len(ranks)
            # As a delivery whose only source, a column of one, is the target itself.
            copies = (want.class_index, region, within, every_tensor, (), ranks, ranks[:, None])
            self.local.append(Delivery(*copies))
        deliveries = [
            self.senders.from_same_node(want, mates, nodes) for mates in demand.from_same_node
        ]
        for afar in demand.from_remote:
            deliveries += self.senders.from_remote(want, afar, nodes)
        for delivery in deliveries:
            size = want.itemsize * elements(delivery.region)
            self.deliveries.append((delivery, tensors.dtype, size))

    def flows(self, hop: int) -> tuple[tuple[tuple[Delivery, np.ndarray | None], ...], Flows]:
        """All deliveries with the flows of their sources, and the flows."""
        dtypes = tuple(sorted({dtype for _, dtype, _ in self.deliveries}))
        fans = tuple(sorted({(), *(delivery.receivers for delivery, _, _ in self.deliveries)}))
        number_of = {fan: number for number, fan in enumerate(fans)}
        parts = []
        for delivery, dtype, size in self.deliveries:
            # One part for each column of sources: source n sends every each-th tensor.
            each = delivery.sources.shape[1]
            way = (dtypes.index(dtype), number_of[delivery.receivers])
            for n in range(each):
                num_tensors = len(delivery.turns[n::each])  # sources take turns, see Delivery
                ends = (delivery.sources[:, n], delivery.targets)
                parts.append(Part(*ends, *way, size * num_tensors))
        columns, flow_of_part = gathered(parts, len(self.nodes.of_rank))
        source, target, dtype_number, fan, size = columns
        flows = Flows(
            source,
            target,
            dtype_number,
            fan,
            size,
            dtypes,
            fans,
            self.nodes,
            self.senders.next_node,
            hop,
        )
        copies = [(copy, None) for copy in self.local]
        with_flows = []
        begin = 0
        for delivery, _, _ in self.deliveries:  # each has a part for every column of its sources
            end = begin + delivery.sources.shape[1]
            with_flows.append((delivery, np.stack(flow_of_part[begin:end], axis=1)))
            begin = end
        return (*copies, *with_flows), flows

    def _check_wanted(self, tensors: TensorClass) -> None:
        names = tensors.names
        full = tensors.full
        whole = Slice((0,) * len(full), full)
        for side, by_role in zip(self.sides, (tensors.sources, tensors.targets), strict=True):
            for role, regions in by_role.items():
                for region in regions:
                    if intersect(region, whole) != region:
                        raise ValueError(
                            f"{names[0]}: rank {side.ranks[role][0]} names {slice_text(region)},"
                            f" which is empty or outside of its shape {full}"
                        )
        for roles, replica in self.replicas.items():
            wanted: list[Slice] = []
            for role in roles:
                wanted += tensors.targets.get(role, ())
            # All slices lie inside of the shape, see above: as many elements are all of them.
            if _covered(tuple(wanted)) == math.prod(full):
                continue
            lost = without(whole, wanted)
            holders: list[int] = []
            for role in tensors.sources:
                holders += self.sides[0].ranks[role]
            raise ValueError(
                f"{names[0]}{slice_text(lost[0])} (and the same slices of {len(names) - 1} other"
                f" tensors) is held by the training ranks {sorted(holders)} but needed by none of"
                f" the rollout ranks {replica}: its update would be lost. Correct the"
                " recorded layout"
            )

    def _raise_unavailable(
        self,
        tensors: TensorClass,
        unavailable: tuple[int, Slice],
        nodes: np.ndarray,
        holders: Mapping[Slice, np.ndarray],
    ) -> None:
        place, region = unavailable
        others = sorted({int(rank) for ranks in holders.values() for rank in ranks})
        raise ValueError(
            f"{tensors.names[0]}{slice_text(region)} (and the same slices of"
            f" {len(tensors.names) - 1} other tensors) is needed by rank"
            f" {self.nodes.ranks[nodes[0], place]} but held by no training rank; holders of other"
            f" parts: {others}. Correct the layout or map the missing parameter"
        )
