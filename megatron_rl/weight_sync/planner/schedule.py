"""When each bucket travels: rounds in which no process sends, or receives, more than one bucket of
bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.flows import Edges, Flows, Stream

ALIGNMENT = 16  # bytes; a multiple of every item size, so that no element is cut
_SLOTS = 8  # parts of a round that are given away; more waste less of it, and plan longer


class BucketId(NamedTuple):
    """A bucket on its way between two ranks: their stream, the flow it belongs to and its first
    byte there."""

    stream: Stream
    flow: int
    begin: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The buckets of all flows, as columns: ``flow`` (in increasing order), ``arrival`` (round of
    arrivals at the first target), ``begin`` and ``size``.

    A round of arrivals is followed by the turns in which ranks pass on what arrived in the one
    before it. Each of these is a round to the transport, which every process follows.
    """

    flows: Flows
    flow: np.ndarray
    arrival: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    rounds_in_flight: int

    @property
    def rounds(self) -> int:
        return len(self._numbers)

    @cached_property
    def first(self) -> np.ndarray:
        """The first bucket of each flow; one entry more than there are flows."""
        return np.searchsorted(self.flow, np.arange(len(self.flows) + 1))

    def messages(self, edges: Edges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(edge, bucket, round)``: the buckets that travel on each of the edges."""
        edge, bucket, key = self._travels(edges)
        return edge, bucket, np.searchsorted(self._numbers, key)

    def _travels(self, edges: Edges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``messages`` with keys in the order of (round of arrivals, turn) in place of rounds."""
        # Every edge carries all buckets of its flow: those of edge 0, then those of edge 1, ...
        counts = np.diff(self.first)[edges.flow]
        edge = np.repeat(np.arange(len(edges.flow)), counts)
        bucket = self.first[edges.flow[edge]] + _counted(counts)
        key = (self.arrival[bucket] + edges.delay[edge]) * self.flows.turns + edges.turn[edge]
        return edge, bucket, key

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The keys that occur: rounds in which nothing travels have no number."""
        return np.unique(self._travels(self.flows.edges)[2])


def _counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each count. Example: of (2, 3) they are 0, 1, 0, 1, 2."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def schedule(flows: Flows, bucket_bytes: int, rounds_in_flight: int) -> Schedule:
    """Cuts each flow into buckets of at most ``bucket_bytes``, in rounds with room at both ends.

    A process issues its rounds in increasing order and waits for them in that order, so the
    earliest unfinished round can always finish: no deadlock, however many rounds are in flight.
    Raises ValueError for sizes that cannot work.
    """
    if bucket_bytes < ALIGNMENT or rounds_in_flight < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes}, rounds_in_flight={rounds_in_flight}: need at least"
            f" {ALIGNMENT} bytes and one round in flight"
        )
    # Rounded down to the alignment: a bucket begins at a slot, so it begins at an element.
    slot = max(ALIGNMENT, bucket_bytes // _SLOTS // ALIGNMENT * ALIGNMENT)
    slots_a_round = bucket_bytes // slot
    first, end = _slots(flows, slot)
    # The slots of a flow in one round are one bucket.
    first_round = first // slots_a_round
    counts = -(-end // slots_a_round) - first_round
    flow = np.repeat(np.arange(len(flows)), counts)
    arrival = first_round[flow] + _counted(counts)
    begin = (np.maximum(arrival * slots_a_round, first[flow]) - first[flow]) * slot
    behind = (np.minimum((arrival + 1) * slots_a_round, end[flow]) - first[flow]) * slot
    size = np.minimum(behind, flows.size[flow]) - begin  # the last slot may be used in part
    return Schedule(flows, flow, arrival, begin, size, rounds_in_flight)


def _slots(flows: Flows, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots ``[first, end)`` of each flow, after all that its ends have given away before."""
    wanted = -(-flows.size // slot)
    first = np.zeros(len(flows), dtype=np.int64)
    next_out, next_in = np.zeros((2, len(flows.nodes.of_rank)), dtype=np.int64)
    for together in matchings(flows):
        # No rank is an end of two of them on one side: all are placed at once.
        source, target = flows.source[together], flows.target[together]
        first[together] = np.maximum(next_out[source], next_in[target])
        next_out[source] = next_in[target] = first[together] + wanted[together]
    return first, first + wanted


def matchings(flows: Flows) -> list[np.ndarray]:
    """The flows in groups in which no rank is the source, or the first target, of two.

    Flows of one component of the graph from sources to targets are grouped by the distance from
    source to target, both counted inside the component, as in a round-robin tournament. Those
    across nodes come first.

    Example: 0->4, 0->5, 1->4, 1->5 have the distances 0, 1, 1 and 0 of two places: the groups are
    0->4 with 1->5, and 0->5 with 1->4.
    """
    if not len(flows):
        return []
    distance = np.zeros(len(flows), dtype=np.int64)
    for crossing in (True, False):
        chosen = np.flatnonzero(flows.crosses == crossing)
        distance[chosen] = _distances(flows.source[chosen], flows.target[chosen])
    # Fans of different turns may share a target; those of one turn cannot.
    turns = [first if fan else 0 for first, fan in zip(flows.first_turns, flows.fans)]
    # The most important key first. ``~crosses`` is 0 across nodes, so those flows come first.
    keys = np.stack([~flows.crosses, np.array(turns)[flows.fan], flows.dtype, distance])
    order = np.lexsort(keys[::-1])  # lexsort counts its last key first
    changes = np.any(np.diff(keys[:, order], axis=1) != 0, axis=0)
    return np.split(order, np.flatnonzero(changes) + 1)


def _distances(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Distance from source to target of each pair, counted in its component."""
    if not len(source):
        return source
    component = _components(source, target)
    places = []
    sizes = []
    for ends in (source, target):
        # Ranks sorted by component, then by rank; the place counts from the component's first one.
        members, inverse = np.unique(np.stack([component, ends]), axis=1, return_inverse=True)
        numbers = np.arange(members.shape[1])
        first = np.searchsorted(members[0], members[0])
        count = np.searchsorted(members[0], members[0], side="right") - first
        places.append((numbers - first)[inverse])
        sizes.append(count[inverse])
    # Modulo the larger side a source and a distance give one target, and a target one source: flows
    # of one distance share no rank.
    return (places[1] - places[0]) % np.maximum(*sizes)


def _components(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """A number for each pair, equal where pairs are connected by common sources or targets.

    Every rank begins with a number of its own, and the lowest one spreads along the pairs until
    nothing changes.
    """
    size = int(max(source.max(), target.max())) + 1
    of_source = np.arange(size)
    of_target = np.arange(size)
    while True:
        lowest = np.minimum(of_source[source], of_target[target])
        before_source = of_source[source]  # indexing by an array copies
        before_target = of_target[target]
        np.minimum.at(of_source, source, lowest)
        np.minimum.at(of_target, target, lowest)
        same_sources = np.array_equal(before_source, of_source[source])
        same_targets = np.array_equal(before_target, of_target[target])
        if same_sources and same_targets:
            return before_source
