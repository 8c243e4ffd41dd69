"""Figures of a plan that no run needs: its buckets one by one, peak staging memory, the peers of a
rank; flows that nobody passes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.weight_sync.planner.flows import Flows, Stream
from megatron_rl.weight_sync.planner.nodes import Nodes
from megatron_rl.weight_sync.planner.schedule import Schedule


@dataclass(frozen=True)
class Bucket:
    """Bytes ``[begin, begin + size)`` of a flow, sent from one end of a stream in one round."""

    round: int
    stream: Stream
    flow: int
    begin: int
    size: int


def direct(streams: Mapping[Stream, int]) -> Flows:
    """Streams that nobody passes on, between ranks that are all on one node."""
    dtypes = tuple(sorted({stream.dtype for stream in streams}))
    ranks: set[int] = set()
    rows = []
    for (source, target, dtype), size in streams.items():
        ranks |= {source, target}
        rows.append((source, target, dtypes.index(dtype), size))
    rows.sort()
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Flows(
        *columns[:3],
        fan=np.zeros(len(rows), dtype=np.int64),
        size=columns[3],
        dtypes=dtypes,
        fans=((),),
        nodes=Nodes.of(ranks, [0] * (1 + max(ranks, default=0))),
        next_node=np.array([-1]),
        hop=1,
    )


def buckets(schedule: Schedule) -> Iterator[Bucket]:
    """Every bucket on every edge, in the order (round, stream, begin)."""
    edges = schedule.flows.edges
    rows = []
    for edge, bucket, number in zip(*schedule.messages(edges), strict=True):
        flow = int(edges.flow[edge])
        ends = (int(edges.sender[edge]), int(edges.receiver[edge]))
        stream = Stream(*ends, schedule.flows.dtypes[schedule.flows.dtype[flow]])
        where = (int(schedule.begin[bucket]), int(schedule.size[bucket]))
        rows.append((int(number), stream, flow, *where))
    return (Bucket(*row) for row in sorted(rows))


def peak_staging_bytes(schedule: Schedule) -> Mapping[int, int]:
    """Rank -> most bytes under way at once when ``rounds_in_flight`` rounds of the rank
    overlap. The buffers of the transport are that large where rounds are full, else somewhat
    larger: later rounds use each again, so it has the size of the largest."""
    edges = schedule.flows.edges
    edge, bucket, number = schedule.messages(edges)
    # A rank in a round as one number: sorted, the busy rounds of a rank follow one another.
    sent = edges.sender[edge] * schedule.rounds + number
    received = edges.receiver[edge] * schedule.rounds + number
    busy, inverse = np.unique(np.concatenate([sent, received]), return_inverse=True)
    total = np.zeros(len(busy) + 1, dtype=np.int64)
    np.add.at(total, inverse + 1, np.tile(schedule.size[bucket], 2))
    total = np.cumsum(total)  # before each of the busy rounds
    rank = busy // max(schedule.rounds, 1)
    # A window of busy rounds begins at each of them and ends with those of its rank.
    ends = np.searchsorted(rank, rank, side="right")
    last = np.minimum(np.arange(len(busy)) + schedule.rounds_in_flight, ends)
    window = total[last] - total[:-1]
    peaks: dict[int, int] = {}
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    for start, end in zip(first, [*first[1:], len(busy)]):
        peaks[int(rank[start])] = int(window[start:end].max())
    return peaks


def streams(flows: Flows) -> Mapping[Stream, int]:
    """Bytes between each two ranks that exchange any."""
    flow, sender, receiver, _, _ = flows.edges
    keys = np.stack([sender, receiver, flows.dtype[flow]])
    pairs, inverse = np.unique(keys, axis=1, return_inverse=True)
    sizes = np.zeros(pairs.shape[1], dtype=np.int64)
    np.add.at(sizes, inverse, flows.size[flow])
    return {
        Stream(int(source), int(target), flows.dtypes[dtype]): int(size)
        for source, target, dtype, size in zip(*pairs, sizes, strict=True)
    }


def num_peers(flows: Flows) -> np.ndarray:
    """Rank -> with how many others it exchanges messages."""
    _, sender, receiver, _, _ = flows.edges
    num_ranks = len(flows.nodes.of_rank)
    # (rank, peer) as one number, both ways around: a pair that talks both ways counts once.
    pairs = np.concatenate([sender * num_ranks + receiver, receiver * num_ranks + sender])
    return np.bincount(np.unique(pairs) // num_ranks, minlength=num_ranks)
