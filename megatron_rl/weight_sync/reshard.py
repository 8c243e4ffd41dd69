"""The planned weight sync: every byte from the training shard that holds it to the place where the
engine keeps it, once."""

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rl.protocols import Parameters, WeightSink, WeightSource
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.collectives import all_gather, broadcast
from megatron_rl.weight_sync.failure import Stage, SyncProgress
from megatron_rl.weight_sync.planner.plan import PlanSettings, make_plan
from megatron_rl.weight_sync.planner.program import compile_program
from megatron_rl.weight_sync.planner.shards import ShardGroup, collect, count_tensors
from megatron_rl.weight_sync.transport import Transport, TransportReport

_Groups = Sequence[ShardGroup]


class ReshardSync:
    """Plans once, at construction, and carries the plan out at every sync."""

    def __init__(
        self,
        source: WeightSource | None,
        sink: WeightSink | None,
        options: TransferOptions,
        *,
        gpus_per_node: int | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over ``group`` (None: all processes). ``source`` and ``sink`` are None on a
        process that has no such side. ``gpus_per_node``: neighbors in rank order that share a node;
        None: those that share a host name.

        Raises ValueError, on every rank, when the two sides do not fit each other: names tensor,
        ranks and slices.
        """
        self._source = source
        self._sink = sink
        self._verify = options.verify
        own_sources = [] if source is None else collect(source.weight_shards())
        own_targets = [] if sink is None else collect(sink.weight_shards())
        self.num_tensors = count_tensors(name for shards in own_targets for name in shards.names)
        sources, targets = exchange(own_sources, own_targets, group)
        settings = PlanSettings(
            bucket_bytes=options.bucket_mib << 20,
            rounds_in_flight=options.rounds_in_flight,
            node_of_rank=_nodes(gpus_per_node, group),
            replicas=_replicas(None if sink is None else sink.replica, group),
            cast=options.cast,
        )
        self.plan = make_plan(sources, targets, settings)
        program = compile_program(self.plan, dist.get_rank(group), own_sources, own_targets)
        self._transport = Transport(program, device, group)

    def sync(self, version: int) -> SyncReport:
        """Collective. ``bytes_sent``: what this process sent; ``bytes_total``: what it was sent,
        plus what it copied from itself.

        Raises:
            ValueError: a training parameter changed dtype or shape; on all ranks, before any move.
            WeightSyncError: on every rank: something went wrong on one of them, or what arrived
                differs from what was sent; names ranks, tensors and slices. On the ranks that
                notice it: a peer is gone. The engine is then unusable.
        """
        return self.carry_out(SyncProgress(version))

    def carry_out(self, progress: SyncProgress) -> SyncReport:
        """``sync`` that records in ``progress`` how far it got, also when this raises."""
        start = time.perf_counter()
        progress.stage = Stage.READYING
        self._ready()
        progress.stage = Stage.OPENING
        reports: list[TransportReport] = []
        # No closure: see ``leave_group``.
        transfer = partial(self._transfer, progress, reports)
        try:
            if self._sink is None:
                transfer(_no_target, lambda key: None)
            else:
                self._sink.update_weights(transfer, progress.version)
        except Exception as error:
            self._tell_peers(progress.stage, error)
            raise
        self._transport.raise_everywhere(None)
        progress.stage = Stage.COMPLETE
        (report,) = reports
        total = report.bytes_received + report.bytes_copied
        seconds = time.perf_counter() - start
        return SyncReport(progress.version, self.num_tensors, report.bytes_sent, total, seconds)

    def _transfer(
        self,
        progress: SyncProgress,
        reports: list[TransportReport],
        parameter: Parameters,
        written: Callable[[str], None],
    ) -> None:
        progress.stage = Stage.MOVING
        report = self._transport.run(self._weight, parameter, written, checked=self._verify)
        if self._verify:
            progress.stage = Stage.COMPARING
            self._transport.compare(report)
        progress.stage = Stage.FINISHING
        reports.append(report)

    def _ready(self) -> None:
        """Collective: the training side has what the plan needs of it. Raises on every rank, before
        anything moves."""
        failed = None
        try:
            if self._source is not None:
                self._source.wait_for_param_gather()
        except Exception as error:  # noqa: BLE001 (raised on every rank)
            failed = error
        self._transport.check_sources(self._weight, failed)

    def _tell_peers(self, stage: Stage, error: Exception) -> None:
        """Collective where the error is of this rank alone: peers must not wait for it."""
        if stage is Stage.OPENING:  # they are sending already: this rank's messages keep their turn
            # With ``failed`` it reads no parameter.
            self._transport.run(_no_target, _no_target, failed=error)
        elif stage is Stage.FINISHING:
            self._transport.raise_everywhere(error)
        else:
            assert stage in (Stage.MOVING, Stage.COMPARING), "which raise on every rank"

    def _weight(self, key: str) -> Tensor:
        assert self._source is not None, f"a process without training side was asked for {key}"
        return self._source.weight(key)


def _no_target(key: str) -> Tensor:
    raise AssertionError(f"a process without rollout side was to receive {key}")


def _nodes(gpus_per_node: int | None, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Collective: the node of each rank, as it reports its own."""
    own = dist.get_rank(group) // gpus_per_node if gpus_per_node else platform.node()
    labels = all_gather(str(own), str, group)
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


def _replicas(replica: int | None, group: dist.ProcessGroup | None) -> list[list[int]]:
    """Collective: the ranks of each replica."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, number in enumerate(all_gather(replica, int | None, group)):
        if number is not None:
            ranks[number].append(rank)
    return [ranks[number] for number in sorted(ranks)]


def _digest(groups: _Groups) -> str:
    """Equal for equal shards, wherever they lie; empty for none."""
    if not groups:
        return ""
    geometry = [(one.names, one.shard.full, one.region, one.shard.dtype) for one in groups]
    return xxhash.xxh3_128_hexdigest(repr(geometry).encode())


def exchange(
    sources: _Groups, targets: _Groups, group: dist.ProcessGroup | None = None
) -> tuple[dict[int, _Groups], dict[int, _Groups]]:
    """Collective: ``(sources, targets)`` of every rank that has such, geometry only but for the
    caller's own. Ranks of one role share one sequence of groups: which rank has which role is sent
    to all, then each role once."""
    rank = dist.get_rank(group)
    everyone = all_gather([_digest(sources), _digest(targets)], list[str], group)
    roles: dict[str, _Groups] = {"": ()}
    sides: list[dict[int, _Groups]] = []
    for side, own in enumerate((sources, targets)):
        # The loop is the same on every rank, for all know all digests: so are the broadcasts.
        for owner, digests in enumerate(everyone):
            if digests[side] not in roles:
                # Where its shards lie is of no use to others: places stay behind.
                message = [
                    replace(one, keys=(), shard=replace(one.shard, offset=0, stride=()))
                    for one in (own if rank == owner else ())
                ]
                roles[digests[side]] = broadcast(message, list[ShardGroup], owner, group)
        of_ranks = {
            number: roles[digests[side]] for number, digests in enumerate(everyone) if digests[side]
        }
        if own:
            of_ranks[rank] = list(own)  # with their places
        sides.append(of_ranks)
    return sides[0], sides[1]
