"""One planned sync into several vLLM servers at once: the ranks of the trainer and the workers of
all servers form one process group, under one plan. A byte that several servers want leaves the
trainer once for each chain of nodes, and they pass it on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_rl.errors import LostPeerError, WeightSyncError
from megatron_rl.protocols import WeightSource
from megatron_rl.runtime.joint_group import connect_store, join_group, leave_group
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.failure import Stage, SyncProgress
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight
from megatron_rl.weight_sync.fleet.controller import (
    FleetController,
    ServersError,
    StepOutcome,
    problem_text,
)
from megatron_rl.weight_sync.planner.plan import Plan
from megatron_rl.weight_sync.planner.shards import count_tensors
from megatron_rl.weight_sync.reshard import ReshardSync


@dataclass
class TrainingSide:
    """The training side of all joint syncs."""

    source: WeightSource  # the policy's weights
    world: World
    secret: str  # of the run; workers know it from the server's VLLM_API_KEY
    options: TransferOptions
    in_flight_requests: InFlight  # what becomes of requests under way when a server is paused
    # Where the policy's weights are; the servers' must be of the same kind.
    device: torch.device | str


@dataclass(frozen=True)
class PushResult:
    """How an update ended."""

    stage: Stage  # how far it got
    updated: tuple[str, ...] = ()  # the servers that serve the new weights
    lost: Mapping[str, str] = field(default_factory=dict)  # those that are at fault, and why
    # The others, paused, whose weights are old, new or both; where new weights were staged they
    # continue with the old ones.
    unfinished: tuple[str, ...] = ()
    problem: str = ""  # what stopped the update; empty where nothing did
    report: SyncReport | None = None  # where all weights arrived


class JointSync:
    """Plans once, at construction, and carries the plan out at every sync.

    The servers serve their old weights before a sync, nothing during it, and the new ones after it;
    or, where new weights are staged, their old ones throughout.
    """

    def __init__(self, trainer: TrainingSide, servers: Mapping[str, HttpServer]) -> None:
        """Collective over the trainer's ranks. ``servers``: by name, used by rank 0 alone.

        Raises, on every rank:
            ServersError: some servers cannot take part.
            ValueError, OSError, RuntimeError: the others cannot together.
        """
        self.names = tuple(servers)
        self._trainer = trainer
        self._world = trainer.world
        self._controller = FleetController(
            servers, trainer.options, trainer.secret, trainer.in_flight_requests
        )
        self._group: dist.ProcessGroup | None = None
        self._sync: ReshardSync | None = None
        try:
            self.plan: Plan = self._connect()
        except Exception as error:
            self.close(error)
            raise

    def _connect(self) -> Plan:
        """Collective over the trainer's ranks: one group with the workers, and the plan."""
        kind = torch.device(self._trainer.device).type
        place = self._world.from_main(lambda: self._controller.connect(self._world.size, kind))
        failed: Exception | None = None
        try:
            self._join(*place)
        except Exception as error:  # noqa: BLE001 (raised below, on every rank)
            failed = error
            self._leave(error)  # so that no peer waits for this rank
        problems = self._world.all_gather("" if failed is None else str(failed))
        ends = self._world.from_main(self._controller.ends)
        if ends.lost:
            raise ServersError(ends.lost) from failed
        if failed is not None:
            raise failed
        if any(problems):
            raise WeightSyncError(next(filter(None, problems)))
        if ends.problems:
            raise ServersError(ends.problems)
        assert self._sync is not None, "it has joined"
        return self._sync.plan

    def _join(self, address: str, port: int, size: int) -> None:
        trainer = self._trainer
        source, options, device = trainer.source, trainer.options, trainer.device
        timeout_s = options.timeout_s
        store = connect_store(address, port, timeout_s)
        self._group = join_group(store, self._world.rank, size, timeout_s, trainer.secret)
        self._sync = ReshardSync(source, None, options, device=device, group=self._group)

    def sync(self, version: int, *, staged: bool = False) -> PushResult:
        """Collective over the trainer's ranks. ``staged``: the new weights wait next to the old
        ones for a command (``commands.switch_weights``). In the report ``bytes_sent``: what this
        rank sent; ``bytes_total``: what the workers were sent, by whomever.

        Raises, on every rank, when nothing has moved and all servers continue with their old
            weights: ValueError: a training parameter changed its dtype or shape. WeightSyncError: a
            rank is not ready.
        """
        assert self._sync is not None, "it is connected"
        start = time.perf_counter()
        progress = SyncProgress(version)
        lost = self._world.from_main(lambda: self._controller.begin(staged=staged))
        if lost:
            return self._stopped(progress, lost)
        progress.stage = Stage.INVITED
        try:
            self._world.from_main(lambda: self._controller.begin_update(version))
        except RuntimeError as error:  # of the servers, of the store
            self._leave(error)
            lost = error.lost if isinstance(error, ServersError) else {}
            return self._stopped(progress, lost, str(error))
        report, problem = self._carry_out(progress)
        ends = self._world.from_main(self._controller.ends)
        if report is None:
            return self._stopped(progress, ends.lost, problem)
        return self._finish(progress, ends, report, start)

    def _carry_out(self, progress: SyncProgress) -> tuple[SyncReport | None, str]:
        """Collective over the trainer's ranks: the report of this one, and no problem; or, on every
        rank, no report and what stopped the update."""
        assert self._sync is not None
        report: SyncReport | None = None
        failed: Exception | None = None
        try:
            report = self._sync.carry_out(progress)
        except Exception as error:  # noqa: BLE001 (a problem of all ranks)
            failed = error
        except BaseException as error:  # of a Ctrl-C peers learn by this rank's end alone
            self._leave(error)
            raise
        is_refused = progress.stage is Stage.READYING and not isinstance(failed, LostPeerError)
        if failed is not None and not is_refused:
            self._leave(failed)  # so that no peer waits for this rank
        everyone = self._world.all_gather((is_refused, "" if failed is None else str(failed)))
        problems = list(dict.fromkeys(text for _, text in everyone if text))
        if not problems:
            progress.stage = Stage.FINISHING  # of the workers: complete here, not yet there
            return report, ""
        if all(refused for refused, _ in everyone):
            # Workers too have raised, and nothing has moved.
            lost = self._world.from_main(lambda: self._controller.call_off())
            if not lost and failed is not None:
                raise failed
            problems.append(problem_text(lost))
        self._leave(failed)
        return None, "; ".join(problems)

    def _finish(
        self, progress: SyncProgress, ends: StepOutcome, report: SyncReport, start: float
    ) -> PushResult:
        """Collective: servers without a problem continue with the new weights."""
        failed = ends.lost | ends.problems
        lost = {name: f"{progress}: {why}" for name, why in ends.lost.items()}
        unfinished = {name: f"{progress}: {why}" for name, why in ends.problems.items()}
        done = [name for name in self.names if name not in failed]
        if done:
            progress.stage = Stage.COMPLETE
            end = self._controller.end_update
            stuck = self._world.from_main(lambda: end(progress.version, done))
            lost |= {name: f"{progress}: {why}" for name, why in stuck.items()}
        if lost or unfinished:
            self._leave()
        report = replace(
            report,
            num_tensors=count_tensors(name for each in self.plan.classes for name in each.names),
            bytes_total=self.plan.bytes_sent,
            seconds=time.perf_counter() - start,
        )
        return PushResult(
            progress.stage,
            updated=tuple(name for name in done if name not in lost),
            lost=lost,
            unfinished=tuple(unfinished),
            problem=problem_text(lost | unfinished),
            report=report,
        )

    def _stopped(
        self, progress: SyncProgress, lost: Mapping[str, str], problem: str = ""
    ) -> PushResult:
        return PushResult(
            progress.stage,
            lost={name: f"{progress}: {why}" for name, why in lost.items()},
            unfinished=tuple(name for name in self.names if name not in lost),
            problem=f"{progress}: {problem or problem_text(lost)}",
        )

    def release(self, pushed: PushResult) -> None:
        """Collective, the end of this sync after an update that some servers did not get: those
        that are unfinished may be pushed to by another. Where one may not, it says so then."""
        self._leave()
        if pushed.stage is not Stage.NOT_BEGUN and pushed.unfinished:
            self._world.from_main(lambda: self._controller.release(pushed.unfinished))
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Collective over the trainer's ranks: leaves the group. The servers serve on. May be
        called again, and after a failure."""
        self._leave(error)
        self._controller.close()

    def _leave(self, error: BaseException | None = None) -> None:
        self._sync = None
        if self._group is not None:
            leave_group(self._group, error)
            self._group = None
