"""A trainer that pushes to one vLLM server and raises what a fleet would log."""

from __future__ import annotations

from megatron_rl.errors import WeightSyncError
from megatron_rl.protocols import WeightSource
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight
from megatron_rl.weight_sync.fleet.joint import JointSync, TrainingSide


class OneServer:
    """A ``JointSync`` into one server; ends with the first update that the server does not get."""

    def __init__(
        self,
        source: WeightSource,
        server: HttpServer,
        world: World,
        options: TransferOptions,
        *,
        in_flight: InFlight = "wait",
        device: str = "cpu",
        secret: str = "",
    ) -> None:
        side = TrainingSide(source, world, secret, options, in_flight, device)
        self.joint = JointSync(side, {"": server})
        self.plan = self.joint.plan

    def sync(self, version: int) -> SyncReport:
        """Collective. Raises WeightSyncError with the problem of the server."""
        result = self.joint.sync(version)
        if result.problem:
            raise WeightSyncError(result.problem)
        assert result.report is not None
        return result.report

    def close(self) -> None:
        self.joint.close()
