"""One policy, many servers that come and go: each gets every version for as long as it is there.

All servers of a publication are one group with the trainer, under one plan: what several of them
want is passed on from node to node. The group lasts while its servers stay the same. One that is
lost in the middle of an update ends it for all; the others are pushed to again, together, without
it. Where the faulty one is unknown, they are pushed to in halves, and again, until it is alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_rl.errors import WeightSyncError, first_line
from megatron_rl.types import SyncReport
from megatron_rl.weight_sync.fleet.commands import HttpServer
from megatron_rl.weight_sync.fleet.controller import ServersError
from megatron_rl.weight_sync.fleet.joint import JointSync, TrainingSide

Names = tuple[str, ...]


@dataclass
class FleetReport:
    """A round of updates, and what it has brought so far."""

    version: int
    servers: Mapping[str, str]
    staged: bool
    took: set[str] = field(default_factory=set)  # the servers that have the version
    # Those that could not be reached or took no weights, and why.
    lost: dict[str, str] = field(default_factory=dict)
    reports: list[SyncReport] = field(default_factory=list)

    @property
    def updated(self) -> Names:
        return tuple(name for name in self.servers if name in self.took)

    @property
    def sync(self) -> SyncReport:
        """All transfers as one."""
        return SyncReport(
            self.version,
            max((report.num_tensors for report in self.reports), default=0),
            bytes_sent=sum(report.bytes_sent for report in self.reports),
            bytes_total=sum(report.bytes_total for report in self.reports),
            seconds=sum((report.seconds for report in self.reports), 0.0),
        )


@dataclass
class FleetSync(TrainingSide):
    """The trainer's end of the weight syncs to all servers.

    Attributes:
        make_server: makes the commands of a server from its URL; rank 0 alone calls them.
    """

    make_server: Callable[[str], HttpServer] | None = None
    _groups: dict[Names, JointSync] = field(default_factory=dict)

    def sync(
        self, version: int, servers: Mapping[str, str], *, staged: bool = False
    ) -> FleetReport:
        """Collective over the trainer's ranks: these servers have the weights of the source when it
        returns, or are in ``lost``. ``staged``: next to those they sample with, which takes no time
        of theirs. ``servers``: URLs by name, equal on every rank; one that is named for the first
        time is connected.

        Raises:
            ValueError: a training parameter changed its dtype or shape.
        """
        done = FleetReport(version, servers, staged)
        # The same order whenever the servers are the same; names begin with that of the machine,
        # so those of a node are neighbors.
        waiting = [tuple(sorted(servers))] if servers else []
        while waiting:
            waiting = [*self._push(waiting[0], done), *waiting[1:]]
        return done

    def keep(self, servers: Collection[str]) -> None:
        """Collective: forgets the servers that are not named."""
        for names in list(self._groups):  # a copy: entries are removed
            if not set(names) <= set(servers):
                self._groups.pop(names).close()

    def _push(self, names: Names, done: FleetReport) -> list[Names]:
        """One attempt. Returns the groups of servers to try again."""
        try:
            group = self._connected({name: done.servers[name] for name in names})
        except (OSError, RuntimeError, ValueError) as error:
            lost = error.lost if isinstance(error, ServersError) else {}
            return _again(names, (), lost, first_line(error), done)
        try:
            pushed = group.sync(done.version, staged=done.staged)
        except WeightSyncError as error:
            self._groups.pop(names).close(error)
            return _again(names, (), {}, first_line(error), done)
        if pushed.report is not None:
            done.reports.append(pushed.report)
        if not pushed.problem:
            done.took |= set(names)
            return []
        self._groups.pop(names).release(pushed)
        return _again(names, pushed.updated, pushed.lost, pushed.problem, done)

    def _connected(self, servers: Mapping[str, str]) -> JointSync:
        """Collective: the group of just these servers, which may have been in other groups."""
        names = tuple(servers)
        if names not in self._groups:
            for others in list(self._groups):
                if not set(others).isdisjoint(names):
                    self._groups.pop(others).close()
            own = partial(HttpServer, timeout_s=self.options.timeout_s, secret=self.secret)
            make = self.make_server or own
            self._groups[names] = JointSync(self, {name: make(servers[name]) for name in names})
        return self._groups[names]


def _again(
    names: Names, updated: Sequence[str], lost: Mapping[str, str], problem: str, done: FleetReport
) -> list[Names]:
    """The groups in which servers are to be tried again, after an attempt with ``names``."""
    done.took |= set(updated)
    done.lost.update({name: first_line(WeightSyncError(why)) for name, why in lost.items()})
    left = tuple(name for name in names if name not in done.took and name not in lost)
    if len(left) < len(names):
        return [left] if left else []
    if len(left) == 1:
        done.lost[left[0]] = problem
        return []
    half = len(left) // 2
    return [left[:half], left[half:]]
