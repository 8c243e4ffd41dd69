"""The scheduler of rollouts: one class for the engines of a launch, for servers and for the
formulas of ``tools/planning``.

It is told what happened and says what to do; it has no clock, sends nothing and reads nothing. The
dispatcher drives it::

    scheduler = Scheduler(rules)
    scheduler.queue.join("replica 0", capacity=256, version=0)
    while not scheduler.is_ready:
        for worker, request in scheduler.assign():      # submit it there
        for worker, request in scheduler.to_abort():    # no answer is wanted any more
        scheduler.limit(group)                          # pause what has so many tokens
        ...                                             # wait until something happens, then:
        if scheduler.finished(worker, request, 17):     # or paused, queue.fail, leave, switch
            ...                                         # keep the answer, have it judged
        scheduler.judged(version, group, wanted=True)   # once all responses of a group are
    groups = scheduler.take()                           # of the next step
    scheduler.published(version)                        # after their update

A strategy decides when a step has its groups (``end_of_step.py``). Tokens, texts and verdicts on
single responses stay with the caller, under (group, response).

Invariants, checked after random events by ``tests/unit/scheduling``:

1. The groups of a step and their versions follow from verdicts and token counts alone: not from the
   order of events, the number of workers or how far ahead was sampled.
2. A group is trained at most once; none is skipped that the method wants.
3. The weights that sampled what step s trains are at most ``staleness`` = k updates older than
   those that are trained: s - k <= version <= s.
4. Each request of an incomplete step waits, runs on one worker, is paused or is answered; under a
   filter groups are admitted until enough are wanted or the limit is reached. So as long as workers
   answer, every step comes to an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.scheduling.end_of_step import EndOfStep, StepGroups, StepRules
from megatron_rl.scheduling.token_level import TokenLevel
from megatron_rl.scheduling.whole_groups import WholeGroups
from megatron_rl.scheduling.work import Assignment, Request, WorkQueue


class Scheduler:
    """See the head of this file. ``queue`` has the workers and their requests; ``end`` says what is
    wanted, and when a step has its groups."""

    def __init__(self, rules: StepRules, *, step: int = 0, version: int = 0) -> None:
        """``step``: the next one, counted from 0: so many updates are done; ``version``: the newest
        weights that are published."""
        self.rules = rules
        self.version = version
        self.queue = WorkQueue(exact=rules.lockstep)
        end = TokenLevel if rules.is_partial else WholeGroups
        self.end: EndOfStep = end(rules, step, version)
        self._aborts: list[Assignment] = []
        self._dropped: set[int] = set()
        self._update()

    # Workers

    def may_switch(self, worker: str) -> bool:
        """Whether a worker may get the newest weights. In lockstep it first ends all work that
        needs those it has; under a filter an incomplete step may still want more of it."""
        if not self.rules.lockstep:
            return True
        version = self.queue.workers[worker].version
        may_want_more = self.rules.is_filtered and self.end.oldest_needed <= version
        return self.queue.is_drained(worker) and not may_want_more

    def is_past(self, version: int) -> bool:
        """In lockstep: whether nothing is, or will be, sampled with weights older than
        ``version``."""
        may_want_more = self.rules.is_filtered and self.end.oldest_needed < version
        return not self.queue.has_older(version) and not may_want_more

    @property
    def wants_newest(self) -> bool:
        """In lockstep, whether something waits for the weights that are published now or, under a
        filter, a verdict may still ask for more of them: before newer ones take their place."""
        may_want_more = self.rules.is_filtered and self.end.oldest_needed <= self.version
        return self.rules.lockstep and (self.queue.num_waiting > 0 or may_want_more)

    def switch(self, worker: str, version: int) -> None:
        """A worker has got other weights: newer ones, or in lockstep older ones, because the
        workers that had these are gone."""
        assert version <= self.version, f"version {version} is not published"
        self.queue.switch(worker, version)

    # Work

    def assign(self) -> list[Assignment]:
        """What is to be submitted now."""
        return self.queue.assign()

    def dropped(self) -> set[int]:
        """Groups that no step needs any more, told once; their answers are to be forgotten."""
        dropped, self._dropped = self._dropped, set()
        return dropped

    def to_abort(self) -> list[Assignment]:
        """What is to be stopped now; each is told once, and its answer no longer counts."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def finished(self, worker: str, request: Request, num_tokens: int = 0) -> bool:
        """Notes an answer, ``num_tokens`` after the start of its step; returns whether it counts.
        If not (it was aborted, or is another worker's by now), the caller drops it."""
        counts = self.queue.finish(worker, request)
        if counts:
            self.end.ended(request, num_tokens)
            self._update()
        return counts

    def paused(self, worker: str, request: Request) -> bool:
        """A response has sampled as many tokens in its step as ``level`` allows, or more."""
        counts = self.queue.finish(worker, request)
        if counts:
            self.end.paused(request)
        return counts

    def limit(self, group: int) -> int | None:
        """Tokens after which a response of this group is paused in its step; None: unknown."""
        level = self.end.level
        return None if level is None else max(0, level - self.end.begin_of(group))

    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        """Takes whether the method wants a whole group, whose requests named ``version``. Aborts
        what no step can need any more; admits what is missing instead."""
        self.end.judged(version, group, wanted=wanted)
        self._update()

    # Steps

    @property
    def is_ready(self) -> bool:
        """Whether the next step has its groups."""
        return self.end.is_ready

    def take(self) -> StepGroups:
        """The groups of the next step, which leave the scheduler."""
        taken = self.end.take()
        self.queue.forget(taken.gone)
        self._update()
        return taken

    def published(self, version: int) -> None:
        """The weights of ``version`` exist. Workers that get them are named by ``switch``."""
        assert version >= self.version
        self.version = version
        self.end.published(version)
        self._update()

    def _update(self) -> None:
        # Drops before it adds: a dropped group may be among the first that the next step asks for,
        # and a cancel after that would take the new requests away.
        if self.end.dropped:
            self._aborts += self.queue.cancel(self.end.dropped)
            self._dropped |= self.end.dropped
            self.end.dropped = set()
        self.queue.add(self.end.new)
        self.end.new = []

    # State

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain values. Running requests are made again."""
        return {"version": self.version, "end": self.end.state()}

    @classmethod
    def restored(cls, rules: StepRules, state: Mapping[str, Any]) -> Scheduler:
        """A scheduler that resumes from ``state``, without workers."""
        # Made with weights older than any, so that it admits nothing before its state is restored.
        scheduler = cls(rules, version=-1)
        scheduler.version = state["version"]
        scheduler.end.restore(state["end"])
        scheduler._update()
        return scheduler
