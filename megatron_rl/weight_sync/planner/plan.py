"""The plan of a weight sync: who sends what to whom, a pure function of the shards that every
process has and needs.

Tensors that the same ranks have and want in the same way form one class, nodes whose ranks have and
want the same of a class are alike, and both are planned once: the cost depends on the number of
kinds of tensors and of nodes, not on their number. No weight is allocated.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_rl.weight_sync.planner.flows import LINKS, SAME_PROCESS, Flows
from megatron_rl.weight_sync.planner.nodes import Nodes, Slices, elements, node_demand
from megatron_rl.weight_sync.planner.roles import Roles, Side, TensorClass, roles_of, tensor_classes
from megatron_rl.weight_sync.planner.schedule import Schedule, schedule
from megatron_rl.weight_sync.planner.senders import Delivery, Senders
from megatron_rl.weight_sync.planner.shards import check_written_once
from megatron_rl.weight_sync.planner.slices import Slice, covered, intersect, slice_text, without


@dataclass(frozen=True)
class Plan:
    """The deliveries, their flows and buckets, and their cost in bytes."""

    classes: tuple[TensorClass, ...]
    # Each with the flow of every entry of its ``sources``; None for local copies.
    deliveries: tuple[tuple[Delivery, np.ndarray | None], ...]
    schedule: Schedule
    bytes_by_link: Mapping[str, int]  # same_process, same_node, across_nodes
    # Bytes that a process needs and does not have, each counted once per process, summed over
    # processes; no plan can send less.
    lower_bound: int
    # Bytes that are needed on a node and that no process of it has, each counted once per node; no
    # plan can send less across nodes.
    node_bound: int

    @property
    def flows(self) -> Flows:
        return self.schedule.flows

    @property
    def bytes_local(self) -> int:
        return self.bytes_by_link[SAME_PROCESS]

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_by_link.values()) - self.bytes_local


@dataclass(frozen=True)
class PlanSettings:
    """What a plan follows from besides the shards."""

    bucket_bytes: int  # see ``schedule``
    rounds_in_flight: int = 2  # see ``schedule``
    gpus_per_node: int = 1  # neighbors in rank order that share a node
    # In its place any number for each rank, equal for those of one node.
    node_of_rank: Sequence[int] | None = None
    # Groups of ranks that must together want every element of every tensor (None: all ranks that
    # need anything are one).
    replicas: Sequence[Sequence[int]] | None = None
    cast: bool = False  # floating types may differ, values are cast before they are sent


def make_plan(sources: Side, targets: Side, settings: PlanSettings) -> Plan:
    """The plan that brings every target shard to its process: from itself if it has it, else from
    its node, else from anywhere, once into each node; equal sources share the load.

    ``sources``, ``targets``: what each rank has, and needs. Deterministic: equal inputs give equal
    plans on every rank.

    Raises ValueError, naming tensor, ranks and slices, for a tensor or an element without holder or
    without receiver, for a shape or dtype that differs, and for an element of a parameter that
    would be written twice.
    """
    taking_part = {*sources, *targets}
    node_of_rank = settings.node_of_rank
    if node_of_rank is None:
        num_ranks = 1 + max(taking_part, default=-1)
        node_of_rank = [rank // settings.gpus_per_node for rank in range(num_ranks)]
    looked_at = set()  # ranks of one role share a sequence: once is enough
    for rank in sorted(targets):
        if id(targets[rank]) not in looked_at:
            check_written_once(rank, targets[rank])
            looked_at.add(id(targets[rank]))
    sides = (roles_of(sources), roles_of(targets))
    replicas = settings.replicas or [sorted(targets)]
    planner = _Planner(sides, Nodes.of(taking_part, node_of_rank), replicas)
    classes = tuple(tensor_classes(*sides, settings.cast))
    for number, tensors in enumerate(classes):
        planner.solve(number, tensors)
    # Along its chain a node passes a bucket on as many rounds later as are in flight: by then the
    # transport has finished the round that brought it, and need not wait for it out of turn.
    flows, flow_of = planner.flows(classes, settings.rounds_in_flight)
    bytes_by_link = {SAME_PROCESS: planner.local_bytes, **flows.bytes_by_link()}
    local = [(copy, None) for copy in planner.local]
    plan = Plan(
        classes,
        (*local, *zip(planner.deliveries, flow_of, strict=True)),
        schedule(flows, settings.bucket_bytes, settings.rounds_in_flight),
        {link: bytes_by_link[link] for link in LINKS},
        planner.lower_bound,
        planner.node_bound,
    )
    across = plan.bytes_by_link["across_nodes"]
    assert (plan.bytes_sent, across) == (plan.lower_bound, plan.node_bound), (
        f"the plan sends {plan.bytes_sent} bytes where {plan.lower_bound} are needed, {across}"
        f" across nodes where {plan.node_bound} must enter nodes"
    )
    return plan


# Many classes have the same few sets of slices.
_covered = lru_cache(maxsize=65536)(covered)


class _Planner:
    """Plans class after class, and keeps the cost so far."""

    def __init__(
        self, sides: tuple[Roles, Roles], nodes: Nodes, replicas: Sequence[Sequence[int]]
    ) -> None:
        self.sides = sides
        self.nodes = nodes
        source_role, target_role = (side.of_ranks(len(nodes.of_rank)) for side in sides)
        # Each kind of replica, once: the roles of its ranks -> the ranks of the first such.
        self.replicas: dict[tuple[int, ...], list[int]] = {}
        for replica in replicas:
            roles = tuple(int(target_role[rank]) for rank in replica)
            self.replicas.setdefault(roles, sorted(replica))
        # Each kind of node, once: the source roles at its places, then the target roles. A place
        # without a rank is -1, which would index the last rank.
        both = (source_role, target_role)
        places = [np.where(nodes.ranks >= 0, role[nodes.ranks], -1) for role in both]
        self.kinds, kind_of = np.unique(np.concatenate(places, axis=1), axis=0, return_inverse=True)
        self.nodes_of_kind = [np.flatnonzero(kind_of == i) for i in range(len(self.kinds))]
        self.senders = Senders(nodes, source_role, target_role)
        self.deliveries: list[Delivery] = []
        self.local: list[Delivery] = []
        self.local_bytes = 0
        self.lower_bound = 0
        self.node_bound = 0

    def solve(self, number: int, tensors: TensorClass) -> None:
        self._check_wanted(tensors)
        if not tensors.targets:
            return
        ranks_of: dict[Slice, list[int]] = defaultdict(list)
        for role, regions in tensors.sources.items():
            for region in dict.fromkeys(regions):
                ranks_of[region] += self.sides[0].ranks[role]
        holders = {region: np.array(sorted(ranks)) for region, ranks in ranks_of.items()}
        # In the order of their first holders: the same on every rank, as all of a plan must be.
        shards = tuple(sorted(holders, key=lambda region: holders[region][0]))
        count = len(tensors.names)
        size = tensors.itemsize * count  # of one element in all tensors of the class
        for (held, wanted), nodes in self._alike(tensors).items():
            demand = node_demand(held, wanted, shards)
            if demand.unavailable is not None:
                place, region = demand.unavailable
                self._raise_unavailable(tensors, region, self.nodes.ranks[nodes[0], place])
            # ``node_demand`` counts elements of one tensor, on one of these nodes.
            self.lower_bound += size * demand.missing * len(nodes)
            self.node_bound += size * demand.entering * len(nodes)
            for near in demand.from_node:
                delivery = self.senders.from_node(number, count, near, nodes)
                if near.holders == (near.place,):
                    self.local.append(delivery)
                    self.local_bytes += size * elements(near.region) * len(nodes)
                else:
                    self.deliveries.append(delivery)
            for afar in demand.from_remote:
                self.deliveries += self.senders.from_remote(
                    number, count, afar, nodes, holders[afar.within]
                )

    def _alike(self, tensors: TensorClass) -> dict[tuple[tuple[Slices, ...], ...], np.ndarray]:
        """``(held, wanted)`` at each place of a node -> the nodes where it is so."""
        num_places = self.kinds.shape[1] // 2
        alike: dict[tuple[tuple[Slices, ...], ...], list[np.ndarray]] = defaultdict(list)
        for roles, nodes in zip(self.kinds.tolist(), self.nodes_of_kind, strict=True):
            held = tuple(tensors.sources.get(role, ()) for role in roles[:num_places])
            wanted = tuple(tensors.targets.get(role, ()) for role in roles[num_places:])
            if any(wanted):
                alike[held, wanted].append(nodes)
        return {pattern: np.sort(np.concatenate(nodes)) for pattern, nodes in alike.items()}

    def flows(self, classes: Sequence[TensorClass], hop: int) -> tuple[Flows, list[np.ndarray]]:
        """What goes the same way added up, and the flow of every source entry of each delivery."""
        dtypes = tuple(sorted({tensors.dtype for tensors in classes}))
        fans = tuple(sorted({(), *(delivery.receivers for delivery in self.deliveries)}))
        number_of = {fan: number for number, fan in enumerate(fans)}
        num_ranks = len(self.nodes.of_rank)
        digits = (num_ranks, num_ranks, len(dtypes), len(fans))
        # A way as one number, whose digits are source, target, dtype and fan: equal ways are found,
        # and sorted in this order, without a loop over millions of entries.
        ways = [np.zeros(0, dtype=np.int64)]
        sizes = [np.zeros(0, dtype=np.int64)]
        for delivery in self.deliveries:
            tensors = classes[delivery.class_index]
            targets = np.broadcast_to(delivery.targets[:, None], delivery.sources.shape)
            way = (dtypes.index(tensors.dtype), number_of[delivery.receivers])
            ways.append(np.ravel_multi_index((delivery.sources, targets, *way), digits).ravel())
            # Source n sends each k-th tensor from the n-th on, see Delivery.
            each = delivery.sources.shape[1]
            counts = np.array([len(delivery.turns[n::each]) for n in range(each)])
            size = tensors.itemsize * elements(delivery.region) * counts
            sizes.append(np.tile(size, len(targets)))
        flows, flow_of_entry = np.unique(np.concatenate(ways), return_inverse=True)
        size = np.zeros(len(flows), dtype=np.int64)
        np.add.at(size, flow_of_entry, np.concatenate(sizes))
        columns = np.unravel_index(flows, digits)
        ends = np.cumsum([len(way) for way in ways])
        flow_of = np.split(flow_of_entry.astype(np.int32), ends)[1:-1]
        shaped = [
            own.reshape(delivery.sources.shape)
            for own, delivery in zip(flow_of, self.deliveries, strict=True)
        ]
        return Flows(*columns, size, dtypes, fans, self.nodes, self.senders.next_node, hop), shaped

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
            wanted = [region for role in roles for region in tensors.targets.get(role, ())]
            # All slices lie inside of the shape, see above: as many elements are all of them.
            if _covered(tuple(wanted)) == math.prod(full):
                continue
            lost = without(whole, wanted)
            holders = [rank for role in tensors.sources for rank in self.sides[0].ranks[role]]
            raise ValueError(
                f"{names[0]}{slice_text(lost[0])} (and the same slices of {len(names) - 1} other"
                f" tensors) is held by the training ranks {sorted(holders)} but needed by none of"
                f" the rollout ranks {replica}: its update would be lost. Correct the"
                " recorded layout"
            )

    def _raise_unavailable(self, tensors: TensorClass, region: Slice, rank: int) -> None:
        others = sorted(rank for role in tensors.sources for rank in self.sides[0].ranks[role])
        raise ValueError(
            f"{tensors.names[0]}{slice_text(region)} (and the same slices of"
            f" {len(tensors.names) - 1} other tensors) is needed by rank {rank} but held by no"
            f" training rank; holders of other parts: {others}. Correct the layout or map the"
            " missing parameter"
        )
