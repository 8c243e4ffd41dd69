"""One policy, many servers that come and go: each gets every version for as long as it is there.

Every server has a group with the trainer of its own, so that one that dies in the middle of an
update takes nobody with it. Servers that are cut alike share one plan. They are served one after
the other, each paused for its own transfer only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from megatron_rl.errors import WeightSyncError, first_line
from megatron_rl.runtime.launch import World
from megatron_rl.types import SyncReport, TransferOptions
from megatron_rl.weight_sync.commands import HttpServer, InFlight, Server
from megatron_rl.weight_sync.reshard import Plans, WeightSource
from megatron_rl.weight_sync.server import ServerSync


@dataclass(frozen=True)
class FleetReport:
    """A round of updates. ``updated``: the servers that have the version now; ``lost``: those that
    could not be reached or took no weights, and why; ``sync``: all transfers as one."""

    updated: tuple[str, ...]
    lost: Mapping[str, str]
    sync: SyncReport


@dataclass
class FleetSync:
    """The trainer's end of the weight syncs to all servers. ``make_server``: from a URL, its
    commands; rank 0 alone calls them."""

    source: WeightSource
    world: World
    secret: str
    options: TransferOptions
    in_flight_requests: InFlight
    device: torch.device | str
    make_server: Callable[[str], Server] | None = None
    plans: Plans = field(default_factory=dict)
    _syncs: dict[str, ServerSync] = field(default_factory=dict)

    def sync(self, version: int, servers: Mapping[str, str]) -> FleetReport:
        """Collective over the trainer's ranks: these servers have the policy's weights when it
        returns, or are in ``lost``. ``servers``: URLs by name, equal on every rank; one that is
        named for the first time is connected.

        Raises:
            ValueError: a training parameter changed its dtype or shape.
        """
        lost: dict[str, str] = {}
        reports: dict[str, SyncReport] = {}
        for name, url in servers.items():
            try:
                reports[name] = self._connected(name, url).sync(version)
            except (WeightSyncError, _NotConnectedError) as error:
                lost[name] = first_line(error)
                if name in self._syncs:
                    self._syncs.pop(name).close(error)
        num_tensors = max((report.num_tensors for report in reports.values()), default=0)
        total = SyncReport(
            version,
            num_tensors,
            bytes_sent=sum(report.bytes_sent for report in reports.values()),
            bytes_total=sum(report.bytes_total for report in reports.values()),
            seconds=sum((report.seconds for report in reports.values()), 0.0),
        )
        return FleetReport(tuple(reports), lost, total)

    def keep(self, servers: Collection[str]) -> None:
        """Collective: forgets the servers that are not named."""
        for name in list(self._syncs):  # a copy: entries are removed
            if name not in servers:
                self._syncs.pop(name).close()

    def _connected(self, name: str, url: str) -> ServerSync:
        if name not in self._syncs:
            make = self.make_server or self._http_server
            try:
                self._syncs[name] = ServerSync(
                    self.source,
                    make(url),
                    self.world,
                    self.options,
                    in_flight_requests=self.in_flight_requests,
                    device=self.device,
                    secret=self.secret,
                    plans=self.plans,
                )
            except ValueError as error:
                raise _NotConnectedError(str(error)) from error
        return self._syncs[name]

    def _http_server(self, url: str) -> Server:
        return HttpServer(url, self.options.timeout_s, self.secret)


class _NotConnectedError(RuntimeError):
    """A server that cannot take weights of this policy, or was not reached."""
