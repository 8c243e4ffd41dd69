"""The servers of a run, and what the main thread waits for, as the dispatcher's thread sees it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.rollouts.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


class FleetEvent(NamedTuple):
    """What the main thread has to act on before it gets what it waits for.

    Attributes:
        servers: URLs of the servers that are to get weights, by name.
        version: Version of these weights; None: the published one.
        is_settled: Where no server is left: whether nothing that is open needs older weights than
            the newest.
    """

    kind: Literal["join", "starved"]
    servers: Mapping[str, str] = {}
    version: int | None = None
    is_settled: bool = True


class NoServerError(ConnectionError):
    """No server is left."""


@dataclass
class Server:
    """A server that has weights of the run. Before it joins, staged ones are its first.

    Attributes:
        staged: Version of the weights beside those in use; not reset when it switches to them.
    """

    url: str
    staged: int = -1
    is_switching: bool = False


class FleetReadiness:
    """What the main thread waits for, as the state of the servers allows it; None: not yet.
    ``newcomers``: URLs of servers that want to join, by name."""

    def __init__(self, dispatcher: Dispatcher, recall: Callable[[str], None]) -> None:
        """``recall``: takes back the requests of a server."""
        self.servers: dict[str, Server] = {}
        self.newcomers: dict[str, str] = {}
        self._dispatcher = dispatcher
        self._scheduler = dispatcher.scheduler
        self._recall = recall
        self._is_told_of_starving = False

    @property
    def at_work(self) -> dict[str, str]:
        """URLs of the servers that have joined."""
        workers = self._scheduler.queue.workers
        return {name: one.url for name, one in self.servers.items() if name in workers}

    def note_arrival(self, name: str, url: str) -> Server:
        """Notes that a server has weights."""
        self.newcomers.pop(name, None)
        self._is_told_of_starving = False
        return self.servers.setdefault(name, Server(url))

    def forget(self, name: str) -> Server | None:
        self.newcomers.pop(name, None)
        return self.servers.pop(name, None)

    # Staged weights

    def _to_switch(self) -> dict[str, Server]:
        """Servers that have newer weights than those in use."""
        workers = self._scheduler.queue.workers
        return {
            name: one
            for name, one in self.servers.items()
            if one.staged >= 0 and (name not in workers or workers[name].version < one.staged)
        }

    def begin_switches(self) -> dict[str, Server]:
        """The servers that are to switch to staged weights now: those that have done what needs the
        old ones. The caller has them switch."""
        begun = {}
        for name, server in self._to_switch().items():
            worker = self._scheduler.queue.workers.get(name)
            if server.is_switching or (worker is not None and worker.is_held):
                continue
            if worker is not None:
                if not self._scheduler.may_switch(name):
                    continue
                if self._scheduler.rules.lockstep:  # else running requests continue with them
                    self._scheduler.queue.recall(name)  # it is idle: no request is taken back
            server.is_switching = True
            begun[name] = server
        return begun

    def _will_have(self, version: int) -> bool:
        """Whether a server will switch to this version by itself."""
        return any(server.staged == version for server in self._to_switch().values())

    # What the main thread waits for

    def arrivals(self) -> FleetEvent | None:
        """Event of servers that want to join; or, reported once, that no server is left."""
        if self.newcomers:
            return FleetEvent("join", dict(self.newcomers))
        if not self.servers and not self._is_told_of_starving:
            self._is_told_of_starving = True
            return FleetEvent("starved", is_settled=self._is_settled)
        return None

    def next_step(self) -> Literal[True] | FleetEvent | None:
        """True where the next step has its groups, and there is a server for what else waits."""
        has_work = self._scheduler.queue.num_waiting > 0
        if self._dispatcher.is_ready and (self.servers or not has_work):
            return True
        return self._lacking() or self.arrivals()

    @property
    def _is_settled(self) -> bool:
        scheduler = self._scheduler
        return not scheduler.rules.lockstep or scheduler.is_past(scheduler.version)

    def settled(self) -> Literal[True] | FleetEvent | None:
        """True where nothing needs older weights than the newest; always true outside lockstep."""
        return True if self._is_settled else self._lacking()

    def drained(self, version: int) -> Mapping[str, str] | FleetEvent | None:
        """URLs of all servers, by name, where they may get weights of ``version``."""
        if version > self._scheduler.version:  # not where a run resumes from a checkpoint
            is_staged = self._scheduler.rules.staleness > 0
            busy = self._has_switched() if is_staged else self._is_drained()
            if busy is not True:
                return busy
        return {**self.at_work, **self.newcomers}

    def _is_drained(self) -> Literal[True] | FleetEvent | None:
        """For weights that replace the old ones at once: True where they may."""
        scheduler = self._scheduler
        if self.at_work:
            return all(map(scheduler.may_switch, self.at_work)) or None
        if scheduler.wants_newest:
            # The last verdicts of a filtered batch may ask for more, of weights that must be there.
            return self.arrivals() if scheduler.queue.num_waiting > 0 else None
        return True

    def _has_switched(self) -> Literal[True] | FleetEvent | None:
        """For staged weights: True where those staged before are in use everywhere."""
        settled = self.settled()
        if settled is not True:
            return settled
        is_switching = any(server.is_switching for server in self.servers.values())
        return None if is_switching or self._to_switch() else True

    def newest(self) -> list[str] | None:
        """Servers with the newest weights; None: one will switch to them by itself; empty: none."""
        workers = self._scheduler.queue.workers
        version = self._scheduler.version
        names = sorted(name for name in self.at_work if workers[name].version == version)
        return names if names or not self._will_have(version) else None

    def for_newest(self) -> FleetEvent | None:
        """Where ``newest`` is empty: the servers that are to get the newest weights."""
        may_switch = self._scheduler.may_switch
        idle = {name: url for name, url in self.at_work.items() if may_switch(name)}
        for name in idle:
            self._recall(name)
        return FleetEvent("join", {**idle, **self.newcomers}) if idle else self.arrivals()

    def _lacking(self) -> FleetEvent | None:
        """In lockstep with staged weights: a request waits for older weights than any server has.
        The trainer gives them to a newcomer, or to a server that goes back to them."""
        rules = self._scheduler.rules
        version = self._scheduler.queue.stranded
        if not (rules.lockstep and rules.staleness) or version is None or self._will_have(version):
            return None
        if self.newcomers:
            return FleetEvent("join", dict(self.newcomers), version)
        if not self.at_work:
            return self.arrivals()
        workers = self._scheduler.queue.workers
        # Those that are held are switching to other weights at this moment.
        free = [one for one in self.at_work if not workers[one].is_held]
        if not free:
            return None
        name = min(free, key=lambda one: (len(workers[one].running), one))
        self._recall(name)
        logger.warning("server %s goes back to weights version %d", name, version)
        return FleetEvent("join", {name: self.at_work[name]}, version)
