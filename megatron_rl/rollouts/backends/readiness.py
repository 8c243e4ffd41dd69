"""What the main thread waits for, as the dispatcher's thread sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from megatron_rl.rollouts.backends.server_parts import FleetEvent
from megatron_rl.rollouts.backends.switches import StagedWeightSwitcher
from megatron_rl.rollouts.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


class FleetReadiness:
    """Each gives None as long as there is nothing to say. ``newcomers``: URLs of the servers that
    want to join, by name."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        switches: StagedWeightSwitcher,
        at_work: Mapping[str, str],
        recall: Callable[[str], None],
    ) -> None:
        """``at_work``: URLs of the servers that have joined, by name, as the dispatcher has them at
        any time; ``recall``: takes its work from one of them."""
        self._dispatcher = dispatcher
        self._scheduler = dispatcher.scheduler
        self._switches = switches
        self._at_work = at_work
        self._recall = recall
        self._is_told_of_starving = False
        self.newcomers: dict[str, str] = {}

    def note_present(self, urls: Mapping[str, str]) -> None:
        """Of all servers that are there."""
        known = self._at_work.keys() | self._switches.newcomers()
        self.newcomers = {name: url for name, url in urls.items() if name not in known}

    def note_arrival(self, name: str) -> None:
        """A server has joined."""
        self.newcomers.pop(name, None)
        self._is_told_of_starving = False

    @property
    def has_servers(self) -> bool:
        """Whether a server has joined, or is about to."""
        return bool(self._at_work or self._switches.newcomers())

    def arrivals(self) -> FleetEvent | None:
        """Of those that want to join; or once that none is left."""
        if self.newcomers:
            return FleetEvent("join", dict(self.newcomers))
        if not self.has_servers and not self._is_told_of_starving:
            self._is_told_of_starving = True
            return FleetEvent("starved")
        return None

    def next_step(self) -> Literal[True] | FleetEvent | None:
        """The next step has its groups, and somebody is there for what else waits."""
        has_work = self._scheduler.queue.num_waiting > 0
        if self._dispatcher.is_ready and (self.has_servers or not has_work):
            return True
        return self._lacking() or self.arrivals()

    @property
    def is_settled(self) -> bool:
        """Whether the newest weights are all that is wanted; not in lockstep it does not matter."""
        scheduler = self._scheduler
        return not scheduler.rules.lockstep or scheduler.is_past(scheduler.version)

    def settled(self) -> Literal[True] | FleetEvent | None:
        """``is_settled``."""
        return True if self.is_settled else self._lacking()

    def drained(self, version: int) -> Mapping[str, str] | FleetEvent | None:
        """All servers may get weights of ``version``: these."""
        if version > self._scheduler.version:  # not where a run goes on from a checkpoint
            is_staged = self._scheduler.rules.staleness > 0
            busy = self._not_over() if is_staged else self._not_drained()
            if busy is not True:
                return busy
        return {**self._at_work, **self.newcomers}

    def newest(self) -> list[str] | None:
        """The servers with the newest weights; none where nobody has or will have them unasked."""
        workers = self._scheduler.queue.workers
        version = self._scheduler.version
        names = sorted(name for name in self._at_work if workers[name].version == version)
        return names if names or not self._switches.bring(version) else None

    def for_newest(self) -> FleetEvent | None:
        """Where ``newest`` are none: who is to get the newest weights."""
        may_switch = self._scheduler.may_switch
        idle = {name: url for name, url in self._at_work.items() if may_switch(name)}
        for name in idle:
            self._recall(name)
        return FleetEvent("join", {**idle, **self.newcomers}) if idle else self.arrivals()

    def _not_drained(self) -> Literal[True] | FleetEvent | None:
        """Of weights that take the place of the old ones at once: True where they may."""
        scheduler = self._scheduler
        if self._at_work:
            return all(map(scheduler.may_switch, self._at_work)) or None
        if scheduler.wants_newest:
            # The last verdicts of a filtered batch may ask for more, of weights that must be there.
            return self.arrivals() if scheduler.queue.num_waiting > 0 else None
        return True

    def _not_over(self) -> Literal[True] | FleetEvent | None:
        """Of weights that are staged: True where what was staged before is in use everywhere."""
        settled = self.settled()
        if settled is not True:
            return settled
        return self._switches.is_over or None

    def _lacking(self) -> FleetEvent | None:
        """In lockstep, where weights are staged: something waits for older ones than any server
        has. The trainer has them for one that has come, or one that goes back to them."""
        rules = self._scheduler.rules
        version = self._scheduler.queue.stranded
        if not (rules.lockstep and rules.staleness) or version is None:
            return None
        if self._switches.bring(version):
            return None
        if self.newcomers:
            return FleetEvent("join", dict(self.newcomers), version)
        if not self._at_work:
            return self.arrivals()
        workers = self._scheduler.queue.workers
        # Those that are held are going over to other weights at this moment.
        loads = [
            (len(workers[one].running), one) for one in self._at_work if not workers[one].is_held
        ]
        if not loads:
            return None
        _, name = min(loads)
        self._recall(name)
        logger.warning("server %s goes back to weights version %d", name, version)
        return FleetEvent("join", {name: self._at_work[name]}, version)
