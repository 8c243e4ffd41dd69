"""The schedulers of a run, at simulated replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from tools.planning.simulated_fleet import Fleet


class Content(Protocol):
    """What would be sampled."""

    def length(self, request: Request) -> int:
        """Tokens of a response."""

    def wants(self, group: int) -> bool:
        """Whether the method wants a group."""


@dataclass(frozen=True)
class Steady:
    """``seconds`` of a step in the mean; ``idle``: share of them in which a replica had no
    sequence, mean of the replicas."""

    seconds: float
    idle: float


@dataclass(frozen=True)
class Push:
    """Seconds of a publication: ``sync_s`` until all replicas have the new weights; ``switch_s``
    until one of them uses what it has staged."""

    sync_s: float
    switch_s: float = 0.0


class Driver:
    """A scheduler and its replicas."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, content: Content, capacity: int) -> None:
        """``capacity``: sequences that a replica takes at a time."""
        self.fleet = fleet
        self.scheduler = scheduler
        self.content = content
        self.names = [_name(number) for number in range(len(fleet.replicas))]
        self.switch_s = 0.0
        for name in self.names:
            scheduler.queue.join(name, capacity, scheduler.version)

    def switch(self) -> None:
        """Replicas that need their old weights no more go over to the newest."""
        newest = self.scheduler.version
        for number, name in enumerate(self.names):
            is_older = self.scheduler.queue.workers[name].version < newest
            if is_older and self.scheduler.may_switch(name):
                self.scheduler.switch(name, newest)
                self.fleet.pause(number, self.switch_s)

    def hand_out(self) -> None:
        self.switch()
        aborts: dict[int, list[Request]] = {}
        for worker, request in self.scheduler.to_abort():
            aborts.setdefault(int(worker), []).append(request)
        for number, requests in aborts.items():
            self.fleet.abort(number, requests)
        work: dict[int, dict[Request, int]] = {}
        for worker, request in self.scheduler.assign():
            work.setdefault(int(worker), {})[request] = self.content.length(request)
        for number, lengths in work.items():
            self.fleet.begin(number, lengths)

    def next_end(self) -> None:
        number, request = self.fleet.next_end()
        assert self.scheduler.finished(_name(number), request)
        if self.scheduler.end.is_whole(request.group):
            wanted = self.content.wants(request.group)
            self.scheduler.judged(request.version, request.group, wanted=wanted)
        self.hand_out()

    def take(self) -> list[int]:
        """Goes on until the next step has its groups, and takes them."""
        self.hand_out()
        while not self.scheduler.is_ready:
            self.next_end()
        groups = self.scheduler.take().groups
        self.hand_out()
        return groups

    def go_on(self, seconds: float) -> None:
        """What the replicas do meanwhile."""
        until_s = self.fleet.now_s + seconds
        while self.fleet.next_moment() <= until_s:
            self.next_end()
        self.fleet.wait_until(until_s)

    def publish(self, version: int, push: Push) -> None:
        """All replicas get new weights: in the place of the old ones where no step is behind, and
        all is done then; else beside them, while they sample. In lockstep that waits until nothing
        is wanted of weights that are older than those of now (``Conditions.drained``)."""
        if self.scheduler.rules.staleness:
            while self.scheduler.rules.lockstep and not self.scheduler.is_past(version - 1):
                self.next_end()
            self.switch_s = push.switch_s
        self.go_on(push.sync_s)
        self.scheduler.published(version)
        self.hand_out()


def beside_training(
    driver: Driver, update_s: float, push: Push, num_steps: int, first_steps: int
) -> Steady:
    """Of a run whose replicas sample while it trains; of ``num_steps`` behind the
    ``first_steps``."""
    begin = Mark.of(driver.fleet)
    for step in range(first_steps + num_steps):
        driver.take()
        driver.go_on(update_s)
        driver.publish(step + 1, push)
        if step + 1 == first_steps:
            begin = Mark.of(driver.fleet)
    return begin.until_now(driver.fleet, num_steps)


@dataclass(frozen=True)
class Mark:
    """A moment of a fleet."""

    now_s: float
    busy_s: float

    @classmethod
    def of(cls, fleet: Fleet) -> Mark:
        return cls(fleet.now_s, fleet.busy_s())

    def until_now(self, fleet: Fleet, num_steps: int) -> Steady:
        """Of the ``num_steps`` since then."""
        seconds = fleet.now_s - self.now_s
        busy = (fleet.busy_s() - self.busy_s) / len(fleet.replicas)
        return Steady(seconds / num_steps, 1 - busy / seconds)


class PartialDriver:
    """The same for partial rollouts. ``there``: tokens of a response of earlier steps; ``limit``:
    most tokens that one gets in this step."""

    def __init__(self, fleet: Fleet, rules: StepRules, content: Content, capacity: int) -> None:
        self.fleet = fleet
        self.scheduler = Scheduler(rules)
        self.content = content
        self.there: dict[tuple[int, int], int] = {}
        self.limit = math.inf
        self.sampled: list[Request] = []  # in this step
        for number in range(len(fleet.replicas)):
            self.scheduler.queue.join(_name(number), capacity, 0)

    def left(self, request: Request) -> int:
        """Tokens that a response still takes."""
        there = self.there.get((request.group, request.response), 0)
        return self.content.length(request) - there

    def hand_out(self) -> None:
        work: dict[int, dict[Request, tuple[int, int]]] = {}
        for worker, request in self.scheduler.assign():
            there = self.there.get((request.group, request.response), 0)
            num_tokens = int(min(self.left(request), self.limit))
            work.setdefault(int(worker), {})[request] = (there, num_tokens)
            self.sampled.append(request)
        for number, responses in work.items():
            self.fleet.resume(number, responses)

    def next_end(self) -> None:
        number, request = self.fleet.next_end()
        if self.left(request) <= self.limit:
            self.scheduler.finished(_name(number), request, self.left(request))
        else:
            self.scheduler.paused(_name(number), request)
        limit = self.scheduler.end.level
        if limit is not None and limit < self.limit:
            self.limit = limit
            self.fleet.limit(limit)
        self.hand_out()

    def step(self) -> tuple[int, int]:
        """Drives one step; responses that were begun before it, and the age of the oldest group."""
        self.limit = math.inf
        self.hand_out()
        while not self.scheduler.is_ready:
            self.next_end()
        taken = self.scheduler.take()
        self.scheduler.published(taken.step + 1)
        for number in range(len(self.fleet.replicas)):
            self.scheduler.switch(_name(number), taken.step + 1)
        trained = set(taken.groups)
        for request in self.sampled:
            name = (request.group, request.response)
            there = self.there.pop(name, 0)
            if request.group not in trained:
                self.there[name] = min(self.content.length(request), there + taken.level)
        self.sampled.clear()
        num_old = sum(first < taken.step for first in taken.first_steps)
        return num_old, taken.step - min(taken.first_steps)


def _name(number: int) -> str:
    return f"{number:06d}"
