"""When each bucket travels: rounds in which no process sends, or receives, more than one bucket."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.flows import Edges, Flows, Stream

ALIGNMENT = 16  # bytes; a multiple of every item size, so that no element is cut
_SLOTS = 8  # parts of a round that are given away; more waste less of it, and plan longer
_LOOK_BACK = 32 * _SLOTS  # slots that are searched before the last one used; older gaps stay open


class BucketId(NamedTuple):
    """A bucket on its way between two ranks: stream, flow, and its first byte there."""

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
    """Cuts each flow into buckets of at most ``bucket_bytes`` and gives each the first rounds with
    room at both ends.

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
    calendar = _Calendar(len(flows.nodes.of_rank), slot, bucket_bytes // slot)
    for together in matchings(flows):
        calendar.place(together, flows)
    return Schedule(flows, *calendar.buckets(), rounds_in_flight)


def matchings(flows: Flows) -> list[np.ndarray]:
    """The flows in groups in which no rank is the source, or the first target, of two.

    Flows of one component of the graph from sources to targets are grouped by the distance from
    source to target, both counted inside the component, as in a round-robin tournament. Those
    across nodes come first, the others fill what they leave.

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


class _Calendar:
    """Which slots of its rounds each rank has given away, out and in. Flows are placed a matching
    at a time: each takes the first slots that are free at both of its ends."""

    def __init__(self, num_ranks: int, slot_bytes: int, slots_a_round: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots_a_round = slots_a_round
        self.busy = np.zeros((2, num_ranks, 64), dtype=bool)  # out, in
        self.free_from = np.zeros((2, num_ranks), dtype=np.int64)  # no free slot before it
        self.used_to = np.zeros((2, num_ranks), dtype=np.int64)  # all are free from there on
        self.placed: list[tuple[np.ndarray, ...]] = []

    def place(self, chosen: np.ndarray, flows: Flows) -> None:
        """Gives slots to the flows ``chosen``, a matching: since no rank is an end of two of them
        on one side, all are placed at once, a row each."""
        wanted = -(-flows.size[chosen] // self.slot_bytes)  # slots, the last one maybe in part
        # (side, ranks) as an index: of what the sources send, and of what the targets receive.
        sending = (0, flows.source[chosen])
        receiving = (1, flows.target[chosen])
        both = [sending, receiving]
        last = np.maximum(self.used_to[sending], self.used_to[receiving])
        first = np.maximum(self.free_from[sending], self.free_from[receiving])
        # One window for all rows. From ``last`` on both ends are free: ``wanted`` more are enough.
        low = int(np.maximum(first, last - _LOOK_BACK).min())
        high = int((last + wanted).max())
        while high > self.busy.shape[2]:
            self.busy = np.concatenate([self.busy, np.zeros_like(self.busy)], axis=2)  # doubled
        window = [self.busy[side, end, low:high] for side, end in both]
        free = ~(window[0] | window[1])
        # The first ``wanted`` free slots: those up to which no more than that many are free.
        taken = free & (np.cumsum(free, axis=1, dtype=np.int32) <= wanted[:, None])
        for (side, end), before in zip(both, window, strict=True):
            now = before | taken
            self.busy[side, end, low:high] = now
            # argmin of a row is its first free slot, but 0 where there is none.
            lowest = np.where(now.all(axis=1), high, low + np.argmin(now, axis=1))
            # A rank whose first free slot lies before the window may still have it.
            known = self.free_from[side, end]
            self.free_from[side, end] = np.where(known >= low, lowest, known)
            # After the last busy slot, which is the first one seen from the end.
            highest = high - np.argmax(now[:, ::-1], axis=1)
            self.used_to[side, end] = np.maximum(self.used_to[side, end], highest)
        self._keep(chosen, flows.size[chosen], wanted, np.nonzero(taken), low)

    def _keep(
        self,
        chosen: np.ndarray,
        size: np.ndarray,
        wanted: np.ndarray,
        taken: tuple[np.ndarray, ...],
        low: int,
    ) -> None:
        """The slots of a flow in one round are one bucket."""
        row, column = taken  # sorted by row, then by column
        first_slot = np.cumsum(wanted) - wanted
        number = np.arange(len(row)) - first_slot[row]  # of the slot in its flow
        arrival = (low + column) // self.slots_a_round
        # A bucket begins where the flow or the round is another than that of the slot before.
        starts = np.flatnonzero(np.diff(row, prepend=-1) | np.diff(arrival, prepend=-1))
        begin = number[starts] * self.slot_bytes
        last_slot = np.append(starts, len(row))[1:] - 1  # before the next bucket's first one
        end = (number[last_slot] + 1) * self.slot_bytes
        bucket_row = row[starts]
        bucket_size = np.minimum(end, size[bucket_row]) - begin
        self.placed.append((chosen[bucket_row], arrival[starts], begin, bucket_size))

    def buckets(self) -> list[np.ndarray]:
        """Columns flow, arrival, begin, size, sorted by flow and begin."""
        if not self.placed:
            return [np.zeros(0, dtype=np.int64)] * 4
        columns = [np.concatenate(column) for column in zip(*self.placed, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns]
