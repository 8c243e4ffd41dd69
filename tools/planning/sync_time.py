"""How long a planned weight sync takes on links of given speeds: simulated message by message."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.weight_sync.planner.flows import Edges
from megatron_rl.weight_sync.planner.plan import Plan


@dataclass(frozen=True)
class Links:
    """GB/s of one GPU in one direction, to its node and to other nodes; ``latency_us``: of a
    message. Example: ``Links(nvlink_gb_s=400, network_gb_s=50)``."""

    nvlink_gb_s: float
    network_gb_s: float
    latency_us: float = 0.0


def least_seconds(plan: Plan, links: Links) -> float:
    """Of the busiest rank, the larger direction of its link to other nodes or to its own, whichever
    takes longer: no order of the plan's messages takes less."""
    edges = plan.flows.edges
    size = plan.flows.size[edges.flow]
    within = plan.flows.nodes.same(edges.sender, edges.receiver)
    longest = 0.0
    for chosen, speed in ((within, links.nvlink_gb_s), (~within, links.network_gb_s)):
        for ends in (edges.sender, edges.receiver):
            load = np.bincount(ends[chosen], weights=size[chosen])
            longest = max(longest, float(load.max(initial=0)) / (speed * 1e9))
    return longest


def simulated_seconds(plan: Plan, links: Links) -> float:
    """Until the last message is there.

    As the transport does it: each rank begins its rounds in order, one when only
    ``rounds_in_flight - 1`` are under way and what it passes on has come. A message takes both of
    its links, one direction each, from when both ends have begun its round; it waits for messages
    of lower rounds on them. Packing, copies inside a rank and other traffic take no time here.
    """
    schedule = plan.schedule
    edges = plan.flows.edges
    edge, bucket, number = schedule.messages(edges)
    order = np.argsort(number, kind="stable")
    clock = _Clock(len(plan.flows.nodes.of_rank), schedule.rounds_in_flight)
    within = plan.flows.nodes.same(edges.sender, edges.receiver)
    speed = np.where(within, links.nvlink_gb_s, links.network_gb_s) * 1e9
    seconds = schedule.size[bucket] / speed[edge] + links.latency_us * 1e-6
    parent = _brought_by(edges, edge)
    arrival = np.zeros(len(edge) + 1)  # the last entry: of what no message brings
    # Round after round: messages sorted by their rounds, cut where the round changes.
    for together in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        if not len(together):
            continue
        clock.begin_round(edges.sender[edge[together]], edges.receiver[edge[together]])
        for chosen in _apart(together, edges, edge):
            ends = (edges.sender[edge[chosen]], edges.receiver[edge[chosen]])
            link = within[edge[chosen]].astype(np.int64)
            arrival[chosen] = clock.move(ends, link, seconds[chosen], arrival[parent[chosen]])
        clock.end_round()
    return float(arrival.max())


def _brought_by(edges: Edges, edge: np.ndarray) -> np.ndarray:
    """For each message the one by which its sender got the same bucket; -1 where the sender had
    it."""
    if not len(edge):
        return edge
    first = np.searchsorted(edge, np.arange(len(edges.flow)))  # messages of an edge stand together
    num_ranks = int(max(edges.sender.max(), edges.receiver.max())) + 1
    arrives = edges.flow * num_ranks + edges.receiver
    leaves = edges.flow * num_ranks + edges.sender
    # The edge on which the flow came to the rank that sends it here, found by the pair (flow, rank)
    # as one number.
    order = np.argsort(arrives)
    at = np.minimum(np.searchsorted(arrives[order], leaves), len(order) - 1)
    before = order[at]
    known = arrives[before] == leaves
    # An edge carries all buckets of its flow in order: the same bucket has the same number on both.
    in_edge = np.arange(len(edge)) - first[edge]
    return np.where(known[edge], first[before[edge]] + in_edge, -1)


def _apart(together: np.ndarray, edges: Edges, edge: np.ndarray) -> list[np.ndarray]:
    """The messages of one round in groups in which nobody sends, or receives, two."""
    groups = []
    while len(together):
        _, by_sender = np.unique(edges.sender[edge[together]], return_index=True)
        chosen = np.sort(by_sender)
        _, by_receiver = np.unique(edges.receiver[edge[together[chosen]]], return_index=True)
        chosen = chosen[by_receiver]
        groups.append(together[chosen])
        together = np.delete(together, chosen)
    return groups


class _Clock:
    """When each rank may begin a round, and each of its links is free."""

    def __init__(self, num_ranks: int, rounds_in_flight: int) -> None:
        self.free = np.zeros((2, 2, num_ranks))  # (out, in), (other nodes, own node)
        self.over = np.zeros((rounds_in_flight, num_ranks))  # ends of the latest rounds, in order
        self.busy = np.zeros(0, dtype=np.int64)
        self.end = np.zeros(num_ranks)

    def begin_round(self, senders: np.ndarray, receivers: np.ndarray) -> None:
        """A round that these ranks take part in; it is over not before the one before."""
        self.busy = np.union1d(senders, receivers)
        self.end[self.busy] = self.over[-1, self.busy]

    def move(
        self,
        ends: tuple[np.ndarray, np.ndarray],
        link: np.ndarray,
        seconds: np.ndarray,
        has: np.ndarray,
    ) -> np.ndarray:
        """When the messages arrive. ``has``: when the sender has what it sends."""
        start = has
        # A rank begins a round when the oldest of the latest ``rounds_in_flight`` is over.
        for side, ranks in enumerate(ends):
            start = np.maximum(start, self.free[side, link, ranks])
            start = np.maximum(start, self.over[0, ranks])
        arrival = start + seconds
        for side, ranks in enumerate(ends):
            self.free[side, link, ranks] = arrival
            self.end[ranks] = np.maximum(self.end[ranks], arrival)
        return arrival

    def end_round(self) -> None:
        self.over[:-1, self.busy] = self.over[1:, self.busy]
        self.over[-1, self.busy] = self.end[self.busy]
