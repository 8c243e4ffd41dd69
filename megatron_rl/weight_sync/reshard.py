"""The planned weight sync: every byte from the training shard that holds it to the place where the engine keeps it, once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rl.runtime.digest import WeightSyncError
from megatron_rl.types import Box, SyncReport
from megatron_rl.weight_sync.boxes import collect
from megatron_rl.weight_sync.plan import make_plan
from megatron_rl.weight_sync.program import Message, compile_program
from megatron_rl.weight_sync.schedule import Stream
from megatron_rl.weight_sync.transport import Parameters, Transport, exchange

Digests = dict[tuple[Stream, int], tuple[str, str]]  # (stream, first byte) of a bucket -> its digest and contents
Transfer = Callable[[Parameters, Callable[[str], None]], None]


class WeightHolder(Protocol):
    """The training side of one process."""

    def weight_boxes(self) -> Sequence[Box]:
        """What this process holds."""

    def settle(self) -> None:
        """Collective over the training side: finish what still changes the weights. Called once before each sync."""

    def weight(self, key: str) -> Tensor:
        """The local parameter that the boxes call ``key``, as it is now."""


class WeightTaker(Protocol):
    """The rollout side of one process."""

    replica: int

    def weight_boxes(self) -> Sequence[Box]:
        """What this process wants; together the processes of one replica want every element of every tensor."""

    def update_weights(self, transfer: Transfer, version: int) -> None:
        """Collective. Open the parameters for writing, call ``transfer(parameter, written)`` once, finish the update, drop caches
        computed with the old weights and stamp ``version``. ``parameter(key)`` gives the tensor that a box is to be written
        to; ``written(key)`` tells that the last box of it is in place. Any exception out of ``transfer`` leaves the engine
        unusable, and it says so."""


class ReshardSync:
    """Plans once, at construction, and carries the plan out at every sync."""

    def __init__(
        self,
        policy: WeightHolder | None,
        engine: WeightTaker | None,
        *,
        gpus_per_node: int,
        bucket_mib: int,
        verify: bool,
        in_flight: int = 2,
        device: torch.device | str = "cpu",
        ignore: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over ``group`` (None: all processes). ``policy`` and ``engine`` are None on a process that has no such side.

        ``verify``: compare a digest of every bucket as packed with the one as arrived, at every sync.
        Raises ValueError, on every rank, when the two sides do not fit each other: names tensor, ranks and slices.
        """
        self._policy, self._engine, self._verify, self._group = policy, engine, verify, group
        held = collect(policy.weight_boxes()) if policy is not None else []
        wanted = collect(engine.weight_boxes()) if engine is not None else []
        self.num_tensors = len({name for group in wanted for name in group.tensors})
        everyone_held, everyone_wants = exchange(held, wanted, group)
        self.plan = make_plan(
            everyone_held,
            everyone_wants,
            gpus_per_node=gpus_per_node,
            bucket_bytes=bucket_mib << 20,
            in_flight=in_flight,
            replicas=_replicas(None if engine is None else engine.replica, group),
            ignore=ignore,
        )
        self._transport = Transport(compile_program(self.plan, dist.get_rank(group), held, wanted), device, group)

    def sync(self, version: int) -> SyncReport:
        """Collective. ``bytes_sent``: what this process sent; ``bytes_total``: what it was sent, plus what it copied from itself.

        Raises:
            ValueError: a training parameter changed its dtype or shape; before anything moves, on every rank.
            WeightSyncError: a peer failed, or what arrived differs from what was sent; names ranks, tensors and slices. The engine
                is then unusable.
        """
        start = time.perf_counter()
        digests: Digests = {}
        moved = []

        def observe(message: Message, buffer: Tensor) -> None:
            digest = xxhash.xxh3_128(memoryview(buffer.cpu().numpy())).hexdigest()
            digests[message.stream, message.begin] = (digest, message.contents)

        def transfer(parameter: Parameters, written: Callable[[str], None]) -> None:
            moved.append(self._transport.run(self._weight, parameter, written, observe if self._verify else None))
            if self._verify:
                _compare(digests, self._group)

        if self._policy is not None:
            self._policy.settle()
        self._transport.check_sources(self._weight)
        if self._engine is None:
            transfer(_nothing, lambda key: None)
        else:
            self._engine.update_weights(transfer, version)
        (report,) = moved
        total = report.bytes_received + report.bytes_copied
        return SyncReport(version, self.num_tensors, report.bytes_sent, total, time.perf_counter() - start)

    def _weight(self, key: str) -> Tensor:
        assert self._policy is not None, f"a process without training side was asked for {key}"
        return self._policy.weight(key)


def _nothing(key: str) -> Tensor:
    raise AssertionError(f"a process without rollout side was to receive {key}")


def _replicas(replica: int | None, group: dist.ProcessGroup | None) -> list[list[int]]:
    """Collective: the ranks of each replica."""
    numbers: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(numbers, replica, group)
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(numbers):
        if number is not None:
            groups[number].append(rank)
    return [groups[number] for number in sorted(groups)]


def _compare(digests: Digests, group: dist.ProcessGroup | None) -> None:
    """Collective: the digest of each bucket is the same at both of its ends. Raises WeightSyncError on every rank."""
    everyone: list[Digests] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, digests, group)
    wrong = []
    for rank, mine in enumerate(everyone):
        for (stream, begin), (digest, contents) in mine.items():
            src, dst, _ = stream
            if rank == src and everyone[dst][stream, begin][0] != digest:
                wrong.append(f"from rank {src} to rank {dst}: {contents}")
    if wrong:
        shown = "; ".join(wrong[:8])
        raise WeightSyncError(f"weight sync: {len(wrong)} buckets arrived with other bytes than were sent: {shown}. Rebuild the engine")
