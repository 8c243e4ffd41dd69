"""The planned weight sync: every byte from the training shard that holds it to the place where the engine keeps it, once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.types import Box, SyncReport
from megatron_rl.weight_sync.boxes import collect
from megatron_rl.weight_sync.plan import make_plan
from megatron_rl.weight_sync.program import compile_program
from megatron_rl.weight_sync.transport import Parameters, Transport, TransportReport, exchange

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

        ``verify``: compare checksums of every bucket as packed with those as arrived, at every sync.
        Raises ValueError, on every rank, when the two sides do not fit each other: names tensor, ranks and slices.
        """
        self._policy, self._engine, self._verify = policy, engine, verify
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
            WeightSyncError: on every rank: something went wrong on one of them, or what arrived differs from what was sent; names
                ranks, tensors and slices. On the ranks that notice it: a peer is gone. The engine is then unusable.
        """
        start = time.perf_counter()
        self._ready()
        moved: list[TransportReport] = []
        begun = False

        def transfer(parameter: Parameters, written: Callable[[str], None]) -> None:
            nonlocal begun
            begun = True
            report = self._transport.run(self._weight, parameter, written, checked=self._verify)
            if self._verify:
                self._transport.compare(report)
            moved.append(report)

        try:
            if self._engine is None:
                transfer(_nothing, lambda key: None)
            else:
                self._engine.update_weights(transfer, version)
        except Exception as error:
            if not begun:
                self._transport.run(_nothing, _nothing, failed=error)
            elif moved:  # whatever else came out of ``transfer`` was raised on every rank
                self._transport.agree(error)
            raise
        self._transport.agree(None)
        (report,) = moved
        total = report.bytes_received + report.bytes_copied
        return SyncReport(version, self.num_tensors, report.bytes_sent, total, time.perf_counter() - start)

    def _ready(self) -> None:
        """Collective: the training side has what the plan wants of it. Raises on every rank, before anything moves."""
        failed = None
        try:
            if self._policy is not None:
                self._policy.settle()
        except Exception as error:  # noqa: BLE001 (raised on every rank)
            failed = error
        self._transport.check_sources(self._weight, failed)

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
