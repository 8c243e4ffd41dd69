"""Flows: all bytes that go one way, from a source to a target and on to others that want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_rl.weight_sync.planner.nodes import Nodes

LINKS = ("same_process", "same_node", "across_nodes")  # nearest first
SAME_PROCESS, SAME_NODE, ACROSS_NODES = LINKS


class Stream(NamedTuple):
    """All bytes of one dtype that go from one rank to another."""

    source: int
    target: int
    dtype: str


class Edges(NamedTuple):
    """The hops of all flows, as columns."""

    flow: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    delay: np.ndarray  # rounds of arrivals after the flow's own
    # 0 for a message into a node or from a source, else the turn, after the arrivals of a round, in
    # which a rank of the same node gets it.
    turn: np.ndarray

    def of_rank(self, rank: int) -> Edges:
        own = (self.sender == rank) | (self.receiver == rank)
        return Edges(*(column[own] for column in self))


@dataclass(frozen=True, eq=False)
class Flows:
    """Every flow, as columns: ``source``, first ``target``, ``dtype`` (in ``dtypes``), the ``fan``
    (in ``fans``: the places of the target's node that want it too) and its ``size`` in bytes.

    The first target passes what it gets on to the others of its fan and, where its node has a
    ``next_node``, to the rank at its own place there, which does the same ``hop`` rounds later.
    """

    source: np.ndarray
    target: np.ndarray
    dtype: np.ndarray
    fan: np.ndarray
    size: np.ndarray
    dtypes: tuple[str, ...]
    fans: tuple[tuple[int, ...], ...]
    nodes: Nodes
    next_node: np.ndarray
    hop: int

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def crosses(self) -> np.ndarray:
        """Whether the source is on another node than the first target."""
        return ~self.nodes.same(self.source, self.target)

    @cached_property
    def first_turns(self) -> tuple[int, ...]:
        """The first of the ``len - 1`` turns of each fan. Fans that share a place have different
        turns, so that no rank is sent more in a turn than one rank received in one round.

        Example: of the fans (0, 1, 2), (2, 3) and (4, 5) the first has turns 1 and 2, the second,
        which shares place 2 with it, turn 3, and the third turn 1.
        """
        first_turns = []
        used: list[tuple[set[int], int]] = []  # places, end of the turns
        for fan in self.fans:
            ends = [end for places, end in used if places & set(fan)]
            first = max(ends, default=1)
            used.append((set(fan), first + max(len(fan) - 1, 0)))
            first_turns.append(first)
        return tuple(first_turns)

    @property
    def turns(self) -> int:
        """Number of turns of a round: that of the arrivals, and those that pass them on."""
        fans = zip(self.first_turns, self.fans, strict=True)
        return max((first + len(fan) - 1 for first, fan in fans if fan), default=1)

    @cached_property
    def edges(self) -> Edges:
        """All edges, those of one flow together."""
        rows: list[tuple[np.ndarray, ...]] = []
        flow = np.arange(len(self))
        sender = self.source
        receiver = self.target
        delay = 0
        # One step along all chains at a time, until the last node of the longest has been reached.
        while len(flow):
            zeros = np.zeros(len(flow), dtype=np.int64)
            rows.append((flow, sender, receiver, zeros + delay, zeros))
            # Mates get it one round of arrivals later: the turns after a round pass on what the
            # one before it brought, see ``Schedule``.
            rows += self._to_same_node(flow, receiver, delay + 1)
            following = self.next_node[self.nodes.of_rank[receiver]]
            goes_on = following >= 0
            flow = flow[goes_on]
            sender = receiver[goes_on]
            # The same place of the next node, so that the bytes stay on their rail.
            receiver = self.nodes.ranks[following[goes_on], self.nodes.position[sender]]
            delay += self.hop
        if not rows:
            return Edges(*[np.zeros(0, dtype=np.int64)] * 5)
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
        order = np.argsort(columns[0], kind="stable")  # by flow
        return Edges(*(column[order] for column in columns))

    def _to_same_node(
        self, flow: np.ndarray, holder: np.ndarray, delay: int
    ) -> list[tuple[np.ndarray, ...]]:
        rows = []
        for number, fan in enumerate(self.fans):
            chosen = np.flatnonzero(self.fan[flow] == number)
            if not fan or not len(chosen):
                continue
            places = np.array(fan)
            sender = holder[chosen]
            # The number of the sender's place in the fan, whose places are in increasing order.
            own = np.searchsorted(places, self.nodes.position[sender])
            # A turn is a rotation of the fan: each holder passes its bytes on to the place
            # ``step`` after its own, so that no rank sends, or receives, two in one turn. Example:
            # in the fan (0, 2, 5) place 2 sends to 5, then to 0.
            for step in range(1, len(fan)):
                place = places[(own + step) % len(fan)]
                receiver = self.nodes.ranks[self.nodes.of_rank[sender], place]
                zeros = np.zeros(len(chosen), dtype=np.int64)
                turn = self.first_turns[number] + step - 1
                rows.append((flow[chosen], sender, receiver, zeros + delay, zeros + turn))
        return rows

    def bytes_by_link(self) -> dict[str, int]:
        """Bytes of all edges within nodes and across."""
        flow, sender, receiver, _, _ = self.edges
        within = self.nodes.same(sender, receiver)
        size = self.size[flow]
        return {SAME_NODE: int(size[within].sum()), ACROSS_NODES: int(size[~within].sum())}
