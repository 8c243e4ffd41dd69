"""The planned sync into one vLLM server: the trainer's end of the backend ``megatron_rl``.

The ranks of the trainer and the workers of the server form one process group for the weights; HTTP
carries only commands.
"""

from __future__ import annotations

import torch

from megatron_rl.errors import WeightSyncError
from megatron_rl.protocols import WeightSource
from megatron_rl.runtime import device as this_device
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.failure import Stage
from megatron_rl.weight_sync.fleet.commands import InFlight, Server
from megatron_rl.weight_sync.fleet.joint import JointSync, TrainingSide
from megatron_rl.weight_sync.reshard import Plans


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
        trainer = TrainingSide(
            source,
            world,
            options or TransferOptions(),
            in_flight_requests,
            this_device.device() if device is None else torch.device(device),
            secret,
            {} if plans is None else plans,
        )
        self._failure: str | None = None
        try:
            self._joint = JointSync(trainer, {"": server})
        except (OSError, RuntimeError) as error:  # of the connection, the store, the group
            raise ValueError(f"weight sync to a server: {error}") from error
        self.plan = self._joint.plan

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
        if not self._joint.is_connected:
            raise ValueError("weight sync to a server: it is closed; construct a new one")
        pushed = self._joint.sync(version)
        if pushed.report is not None and not pushed.problem:
            return pushed.report
        if pushed.stage is Stage.NOT_BEGUN:
            raise WeightSyncError(f"weight sync to a server: {pushed.problem}")
        self._failure = f"{pushed.problem}. The server stays paused; restart it"
        raise WeightSyncError(f"weight sync to a server: {self._failure}")

    def close(self, error: BaseException | None = None) -> None:
        """Collective over the trainer's ranks: leaves the group. The server serves on. May be
        called again, and after a failure."""
        self._joint.close(error)
