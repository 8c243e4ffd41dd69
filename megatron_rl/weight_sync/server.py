"""The planned sync into vLLM servers: the trainer's end of the backend ``megatron_rl``.

The ranks of the trainer and the workers of the server form one process group for the weights; HTTP
carries only commands.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime import device as this_device
from megatron_rl.runtime.joint_group import join_group, leave_group, visit_store
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.commands import InFlight, Server
from megatron_rl.weight_sync.failure import Progress, Stage
from megatron_rl.weight_sync.host import Host
from megatron_rl.weight_sync.reshard import Plans, ReshardSync, WeightSource


class ServerSync:
    """Implements ``protocols.WeightSync``: plans once, at construction, and carries the plan out at
    every sync.

    The server serves its old weights before a sync, nothing during it, and the new ones after it;
    when a sync fails in the middle it stays paused and its workers refuse to run. When one fails
    before anything has moved, the old weights serve on.
    """

    def __init__(
        self,
        source: WeightSource,
        server: Server,
        world: World,
        options: TransferOptions | None = None,
        *,
        in_flight_requests: InFlight = "wait",
        device: torch.device | str | None = None,
        secret: str = "",
        plans: Plans | None = None,
    ) -> None:
        """Collective over the trainer's ranks; ``server`` is used by rank 0 alone. ``options``:
        None: those of ``TransferOptions()``. ``device``: where the policy's weights are, None:
        where this process computes; the server's must be of the same kind. ``secret``: of the
        run; the workers know it from the server's VLLM_API_KEY. ``plans``: those made for other
        servers; one of the same shape is not planned again.

        Raises ValueError, on every rank: the server is not reached, lacks the backend, or holds
        another model; names tensors.
        """
        self._source = source
        self._world = world
        self._options = options or TransferOptions()
        self._in_flight_requests = in_flight_requests
        self._device = this_device.device() if device is None else torch.device(device)
        self._secret = secret
        self._plans = plans
        self._host = Host(server, self._options, secret)
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._sync: ReshardSync | None = None
        try:
            self._sync = self._connect()
        except Exception as error:
            self.close(error)
            # Of the connection, the store and the group; anything else passes as it is.
            if not isinstance(error, OSError | RuntimeError):
                raise
            raise ValueError(f"weight sync to a server: {error}") from error
        self.plan = self._sync.plan

    def _connect(self) -> ReshardSync:
        """Collective over the trainer's ranks: one group with the workers, and the plan."""
        timeout_s = self._options.timeout_s
        address, port, size = self._world.from_main(
            lambda: self._host.invite(self._world.size, self._device.type)
        )
        store = visit_store(address, port, timeout_s)
        self._group = join_group(store, self._world.rank, size, timeout_s, self._secret)
        sync = ReshardSync(
            self._source,
            None,
            self._options,
            gpus_per_node=None,
            device=self._device,
            group=self._group,
            plans=self._plans,
        )
        self._world.from_main(self._host.check)
        return sync

    def sync(self, version: int) -> SyncReport:
        """Collective over the trainer's ranks. ``bytes_sent``: what this rank sent;
        ``bytes_total``: what the workers were sent.

        Raises:
            ValueError: a training parameter changed its dtype or shape. The server goes on with its
                old weights.
            WeightSyncError: server or network failed, or other bytes arrived than were sent. The
                message says whether the server goes on with its old weights, then a later sync may
                work, or stays paused.
        """
        if self._failure is not None:
            raise WeightSyncError(f"weight sync to a server: {self._failure}")
        if self._sync is None:
            raise ValueError("weight sync to a server: it is closed; construct a new one")
        start = time.perf_counter()
        progress = Progress(version)
        try:
            self._world.from_main(lambda: self._host.pause(self._in_flight_requests))
        except ConnectionError as error:
            raise WeightSyncError(f"weight sync to a server: {progress}: {error}") from error
        progress.stage = Stage.INVITED
        try:
            report = self._push(self._sync, progress)
        except BaseException as error:  # a Ctrl-C too leaves the server paused and peers waiting
            problem = ""
            # Every rank has raised, workers included, and nothing has moved.
            if progress.stage is Stage.READYING and isinstance(error, Exception):
                problem = self._world.from_main(self._host.call_off)
                if not problem:
                    raise
            self._failure = f"{progress}: {error}{problem}. The server stays paused; restart it"
            self._leave(error)  # so that no peer waits for this rank
            raise WeightSyncError(f"weight sync to a server: {self._failure}") from error
        return replace(
            report,
            num_tensors=sum(len(tensors.names) for tensors in self.plan.classes),
            bytes_total=self.plan.bytes_sent,
            seconds=time.perf_counter() - start,
        )

    def _push(self, sync: ReshardSync, progress: Progress) -> SyncReport:
        """Collective, while the server is paused."""
        self._world.from_main(lambda: self._host.begin_update(progress.version))
        report = sync.carry_out(progress)
        progress.stage = Stage.FINISHING  # of the workers: complete here, but not yet there
        self._world.from_main(self._host.check)
        progress.stage = Stage.COMPLETE
        self._world.from_main(lambda: self._host.end_update(progress.version))
        return report

    def close(self, error: BaseException | None = None) -> None:
        """Collective over the trainer's ranks: leaves the group. The server serves on. May be
        called again, and after a failure."""
        self._leave(error)
        self._host.close()

    def _leave(self, error: BaseException | None = None) -> None:
        self._sync = None
        if self._group is not None:
            leave_group(self._group, error)
            self._group = None
