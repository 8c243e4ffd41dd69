"""The scheduler of rollouts: one class for the engine of the training processes, for servers and
for the simulator of ``tools/bench``.

It is told what happened and says what to do; it has no clock, sends nothing and reads nothing. The
caller drives it::

    scheduler = Scheduler(rules)
    scheduler.join("replica 0", capacity=256, version=0)
    while not scheduler.is_ready:
        for worker, request in scheduler.assign():      # submit it there
        for worker, request in scheduler.to_abort():    # no answer is wanted any more
        ...                                             # wait until something happens, then tell:
        if scheduler.finished(worker, request):         # or failed, leave, join, switch
            ...                                         # keep the answer, have it judged
        scheduler.judged(version, group, wanted=True)   # once all responses of a group are
    batch = scheduler.take()                            # the groups of the next step
    scheduler.published(version)                        # after their update

Tokens, texts and verdicts on single responses stay with the caller, under (group, response).

Invariants, checked after random events by ``tests/unit/scheduling/test_scheduler_fuzz.py``:

1. The groups of a step and their versions follow from the verdicts alone (``batches``): not from
   the order of events, the number of workers or how far ahead was sampled.
2. A group is trained at most once; none is skipped that the method wants.
3. The weights that sampled what step s trains are at most ``staleness`` = k updates older than
   those that are trained: s - k <= version <= s. ``take`` looks at it again.
4. Each request of an incomplete batch waits, runs on one worker or is answered; if the batch is
   filtered, groups are admitted until enough are wanted or its limit is reached. So as long as
   workers answer, every step comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.scheduling.batches import Batch, KeptShare, Rules
from megatron_rl.scheduling.work import Assignment, Request, WorkQueue


class Scheduler:
    """See the head of this file."""

    def __init__(
        self,
        rules: Rules,
        *,
        step: int = 0,
        start: int = 0,
        version: int = 0,
        kept_share: KeptShare | None = None,
    ) -> None:
        """
        Args:
            step: the next one, counted from 0: so many updates are done.
            start: its first group.
            version: newest weights that are published.
            kept_share: what is known of it; goes on to be noted there.
        """
        self.rules = rules
        self.version = version
        self.queue = WorkQueue(exact=rules.lockstep)
        self.kept_share = kept_share or KeptShare()
        self._step = step
        self._start = start
        self._batches: list[Batch] = []  # not yet taken, in the order of steps
        self._answered: dict[int, set[int]] = {}  # group -> its responses that are there
        self._sampled_by: dict[int, int] = {}  # group -> oldest weights that a request was given to
        self._aborts: list[Assignment] = []
        self._admit()

    # Workers

    def join(self, worker: str, capacity: int, version: int) -> None:
        """A new worker, with weights of ``version``; it takes ``capacity`` requests at a time."""
        self.queue.join(worker, capacity, version)

    def leave(self, worker: str) -> None:
        """A worker is gone: its requests go to others."""
        self.queue.leave(worker)

    def may_switch(self, worker: str) -> bool:
        """Whether a worker may get the newest weights. In lockstep it first ends all work that
        needs those it has; under a filter an incomplete batch may still want more of it."""
        if not self.rules.lockstep:
            return True
        version = self.queue.workers[worker].version
        may_want_more = self.rules.is_filtered and self.oldest_needed <= version
        return self.queue.is_drained(worker) and not may_want_more

    def is_past(self, version: int) -> bool:
        """In lockstep: whether nothing is, or will be, sampled with weights older than
        ``version``."""
        may_want_more = self.rules.is_filtered and self.oldest_needed < version
        return not self.queue.has_older(version) and not may_want_more

    def hold(self, worker: str) -> None:
        """A worker is about to get other weights: it is given nothing until ``switch``."""
        self.queue.hold(worker)

    def recall(self, worker: str) -> list[Assignment]:
        """``hold``, where it has work that others can do or it will do again: that waits, and is to
        be aborted."""
        self.queue.hold(worker)
        return self.queue.recall(worker)

    def switch(self, worker: str, version: int) -> None:
        """A worker has got other weights: newer ones, or in lockstep older ones, because those that
        had them are gone."""
        assert version <= self.version, f"version {version} is not published"
        self.queue.switch(worker, version)

    # Work

    def assign(self) -> list[Assignment]:
        """What is to be submitted now."""
        assigned = self.queue.assign()
        for worker, request in assigned:
            version = self.queue.workers[worker].version
            oldest = self._sampled_by.get(request.group, version)
            self._sampled_by[request.group] = min(oldest, version)
        return assigned

    def to_abort(self) -> list[Assignment]:
        """What is to be stopped now; each is told once, and its answer no longer counts."""
        aborts = self._aborts
        self._aborts = []
        return aborts

    def finished(self, worker: str, request: Request) -> bool:
        """An answer; whether it counts. If not (it was aborted, or is somebody else's by now), it
        is to be dropped."""
        if not self.queue.finish(worker, request):
            return False
        self._answered.setdefault(request.group, set()).add(request.response)
        return True

    def is_whole(self, group: int) -> bool:
        """Whether all responses of an admitted group are there."""
        return len(self._answered.get(group, ())) == self.rules.responses_per_group

    def batch_with(self, group: int) -> Batch | None:
        """The step to come that a group is admitted to; None: to none any more."""
        for batch in self._batches:
            if batch.has(group):
                return batch
        return None

    def to_judge(self) -> list[tuple[int, int]]:
        """Version and number of every group that is whole and waits for its verdict."""
        waiting = []
        for batch in self._batches:
            for group in range(batch.start, batch.start + batch.admitted):
                if self.is_whole(group) and group not in batch.verdicts:
                    waiting.append((batch.version, group))
        return waiting

    def failed(self, worker: str, request: Request) -> None:
        """A worker could not answer; the request waits again."""
        self.queue.fail(worker, request)

    def judged(self, version: int, group: int, *, wanted: bool) -> None:
        """Whether the method wants a whole group, whose requests named ``version``. What no step
        can need any more is aborted; what is missing instead is admitted. A verdict on responses
        that were dropped meanwhile changes nothing."""
        batch = self._batch_of(version, group)
        if batch is None or group in batch.verdicts or not self.is_whole(group):
            return
        batch.judge(group, wanted=wanted)
        if self.rules.is_filtered and wanted:
            dropped = batch.drop_unneeded()
            self._aborts += self.queue.cancel(lambda request: request.group in dropped)
            self._forget(dropped)
        self._admit()

    # Steps

    @property
    def num_answered(self) -> int:
        """Responses that are there, of groups that no step has taken yet."""
        return sum(map(len, self._answered.values()))

    @property
    def start(self) -> int:
        """The first group that a step may still take."""
        return self._start

    @property
    def is_ready(self) -> bool:
        """Whether the next step has its groups."""
        return bool(self._batches) and self._batches[0].is_complete

    @property
    def oldest_needed(self) -> int:
        """The oldest weights that something is still to be sampled with. A run that goes on from a
        checkpoint has the newest alone: in lockstep it is ``state`` that waits until these are."""
        for batch in self._batches:
            if not batch.is_complete:
                return batch.version
        return self.rules.version_of(self._next_step)

    @property
    def wants_newest(self) -> bool:
        """In lockstep, whether something waits for the weights that are published now or, under a
        filter, a verdict may still ask for more of them: before newer ones take their place."""
        may_want_more = self.rules.is_filtered and self.oldest_needed <= self.version
        return self.rules.lockstep and (self.queue.num_waiting > 0 or may_want_more)

    def take(self) -> Batch:
        """The groups of the next step, which leave the scheduler."""
        assert self.is_ready, "the next step has not all of its groups"
        batch = self._batches.pop(0)
        groups = batch.groups
        # A filter may leave no group at all.
        oldest = min((self._sampled_by[group] for group in groups), default=batch.version)
        assert batch.step - oldest <= self.rules.staleness, (
            f"step {batch.step} would train what weights {oldest} have sampled"
        )
        self.kept_share.note(len(groups), len(groups) + batch.num_refused)
        self._step = batch.step + 1
        self._start = batch.start + batch.admitted
        self._forget(range(batch.start, self._start))
        self._admit()
        return batch

    def published(self, version: int) -> None:
        """The weights of ``version`` exist. Workers that get them are named by ``switch``."""
        assert version >= self.version
        self.version = version
        self._admit()

    def _admit(self) -> None:
        """Opens the batches of all steps whose weights are published and whose start is known, and
        admits what they lack."""
        # Without a filter the end of a batch is known at once, so with staleness k the batches of
        # k + 1 steps are open; with one the next start is known when the batch is complete.
        while self.rules.version_of(self._next_step) <= self.version:
            start = self._batches[-1].end if self._batches else self._start
            if start is None:
                break
            self._batches.append(Batch(self.rules, self._next_step, start))
        share = self.kept_share.value if self.rules.is_filtered else 1.0
        for batch in self._batches:
            first = batch.start + batch.admitted
            batch.admitted += batch.missing(share)
            self._request(batch, range(first, batch.start + batch.admitted))

    def _request(self, batch: Batch, groups: Iterable[int]) -> None:
        """Queues what is not there of some groups."""
        for group in groups:
            answered = self._answered.get(group, set())
            responses = set(range(self.rules.responses_per_group)) - answered
            self.queue.add(Request(batch.version, group, response) for response in responses)

    @property
    def _next_step(self) -> int:
        return self._batches[-1].step + 1 if self._batches else self._step

    def _batch_of(self, version: int, group: int) -> Batch | None:
        for batch in self._batches:
            if batch.has(group) and batch.version == version:
                return batch
        return None

    def _forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._answered.pop(group, None)
            self._sampled_by.pop(group, None)
            self.queue.forget_group(group)

    # State

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain values: the position, the batches that are open, and
        which of their responses are there (the caller keeps those). What runs is asked for again.
        """
        return {
            "step": self._step,
            "start": self._start,
            "version": self.version,
            "kept_share": [self.kept_share.wanted, self.kept_share.seen],
            "batches": [_saved(batch) for batch in self._batches],
            "answered": {group: sorted(there) for group, there in self._answered.items()},
            "sampled_by": dict(self._sampled_by),
        }

    @classmethod
    def restored(cls, rules: Rules, state: Mapping[str, Any]) -> Scheduler:
        """One that goes on from ``state``, without workers."""
        # Made with weights older than any, so that it admits nothing before the saved batches are
        # in.
        scheduler = cls(rules, step=state["step"], start=state["start"], version=-1)
        scheduler.version = state["version"]
        scheduler.kept_share = KeptShare(*state["kept_share"])
        scheduler._answered = {group: set(there) for group, there in state["answered"].items()}
        scheduler._sampled_by = dict(state["sampled_by"])
        for number, saved in enumerate(state["batches"]):
            batch = Batch(rules, state["step"] + number, saved["start"], saved["admitted"])
            for group in sorted(saved["verdicts"]):
                batch.judge(group, wanted=saved["verdicts"][group])
            scheduler._batches.append(batch)
            scheduler._request(batch, range(batch.start, batch.start + batch.admitted))
        scheduler._admit()
        return scheduler


def _saved(batch: Batch) -> dict[str, Any]:
    """Its step follows from its place among the batches."""
    return {"admitted": batch.admitted, "start": batch.start, "verdicts": dict(batch.verdicts)}
