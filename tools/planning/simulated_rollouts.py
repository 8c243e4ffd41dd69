"""A run at simulated replicas: its own dispatcher, with a formula for a backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.rollouts.dispatcher import (
    Dispatcher,
    Ended,
    Event,
    GenerationRequest,
    Scored,
    Unfinished,
)
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.prompts import FixedPrompts
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.rollouts.store import Place, ResponseStore
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Prompt, Sampling, Score, VersionSpan
from tools.planning.simulated_fleet import Fleet


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

    sync_s: float = 0.0
    switch_s: float = 0.0


class SimulatedPrompts(FixedPrompts):
    """A stream without an end, of which nothing but the numbers matters."""

    def prompt(self, number: int, visit: int = 1) -> Prompt:
        return Prompt(str(number), (), "", "")

    def forget_visits(self, groups: Iterable[int]) -> None: ...


class TokenCounts(ResponseStore):
    """Lengths in place of tokens: what responses had at the start of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[Place, int] = {}

    def length(self, place: Place) -> int:
        return self.there.get(place, 0)


class SimulatedRun:
    """Implements ``GenerationBackend``. Every step has the same ``[prompts, responses]`` tokens,
    and all of them are wanted."""

    def __init__(self, fleet: Fleet, rules: StepRules, tokens: np.ndarray, capacity: int) -> None:
        """``capacity``: sequences that a replica takes at a time."""
        self.fleet = fleet
        self.scheduler = Scheduler(rules)
        self._tokens = tokens
        self._counts = TokenCounts()
        plan = SamplingPlan(Sampling(rules.responses_per_group, int(tokens.max())))
        prompts, verdicts = SimulatedPrompts([]), VerdictRules(1, 0.0)
        job = GenerationJob(rules, prompts, plan, all, verdicts, store=self._counts)
        no_rewards: Any = None
        self._dispatcher = Dispatcher(job, self.scheduler, self, no_rewards)
        self._switch_s = 0.0
        self._level: int | None = None
        self._is_due = False  # whether ``events`` goes to the next end
        for number in range(len(fleet.replicas)):
            self.scheduler.queue.join(_name(number), capacity, 0)

    # See GenerationBackend

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        there = self._counts.length(wanted.request.place)
        left = self._left(wanted.request)
        num_tokens = left if self._level is None else min(left, self._level)
        self.fleet.begin(int(worker), wanted.request, num_tokens, there)

    def abort(self, worker: str, request: Request) -> None:
        self.fleet.abort(int(worker), request)

    def pause(self, level: int) -> None:
        self._level = level
        self.fleet.limit(level)

    def events(self) -> list[Event]:
        if not self._is_due:
            return []
        self._is_due = False
        number, request = self.fleet.next_end()
        worker = _name(number)
        if self._level is not None and self._left(request) > self._level:
            return [Unfinished(worker, request, is_paused=True)]
        length = self._length(request.place)
        spans = (VersionSpan(request.version, length),)
        return [
            Ended(worker, request, length, False, spans),
            Scored(request, Score(1.0, True)),
        ]

    def holder(self, worker: str | None, group: int) -> int:
        return 0

    def _length(self, place: Place) -> int:
        group, response = place
        return int(self._tokens[group % len(self._tokens), response])

    def _left(self, request: Request) -> int:
        return self._length(request.place) - self._counts.length(request.place)

    # The trainer

    def take(self) -> None:
        """Continues until the next step has its groups, and takes them."""
        self._hand_out()
        while not self._dispatcher.is_ready:
            self._next_end()
        groups = self._dispatcher.take().groups
        self._level = None
        for group, limit in groups.limits.items():
            for response in range(self.scheduler.rules.responses_per_group):
                place = group, response
                there = self._counts.there.pop(place, 0)
                if group not in groups.groups:
                    self._counts.there[place] = min(self._length(place), there + limit)
        self._hand_out()

    def work(self, seconds: float) -> None:
        """What the replicas do meanwhile."""
        until_s = self.fleet.now_s + seconds
        while self.fleet.next_moment() <= until_s:
            self._next_end()
        self.fleet.wait_until(until_s)

    def publish(self, version: int, push: Push) -> None:
        """All replicas get new weights: in the place of the old ones where no step is behind, and
        all is done then; else next to them, while they sample. In lockstep that waits until nothing
        is wanted of weights that are older than those of now (``FleetReadiness.drained``)."""
        if self.scheduler.rules.staleness:
            while self.scheduler.rules.lockstep and not self.scheduler.is_past(version - 1):
                self._next_end()
            self._switch_s = push.switch_s
        self.work(push.sync_s)
        self.scheduler.published(version)
        self._hand_out()

    def _next_end(self) -> None:
        self._is_due = True
        self._hand_out()

    def _hand_out(self) -> None:
        """All get work; replicas that need their old weights no more go over to the newest."""
        self._dispatcher.turn()
        newest = self.scheduler.version
        has_switched = False
        for name, worker in self.scheduler.queue.workers.items():
            if worker.version < newest and self.scheduler.may_switch(name):
                self.scheduler.switch(name, newest)
                self.fleet.pause(int(name), self._switch_s)
                has_switched = True
        if has_switched:  # after all of them: else the first would get what the others could take
            self._dispatcher.turn()


def in_the_mean(
    run: SimulatedRun, first_steps: int, num_steps: int, update_s: float = 0.0, push: Push = Push()
) -> Steady:
    """Of ``num_steps`` steps after the ``first_steps``, each with an update and a publication."""
    fleet = run.fleet
    begin_s = busy_s = 0.0
    for step in range(first_steps + num_steps):
        if step == first_steps:
            begin_s, busy_s = fleet.now_s, fleet.busy_s()
        run.take()
        run.work(update_s)
        run.publish(step + 1, push)
    seconds = fleet.now_s - begin_s
    busy = (fleet.busy_s() - busy_s) / len(fleet.replicas)
    return Steady(seconds / num_steps, 1 - busy / seconds)


def _name(number: int) -> str:
    return f"{number:06d}"
