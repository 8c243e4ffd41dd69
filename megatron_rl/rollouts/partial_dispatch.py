"""Rank 0's part of a step of partial rollouts: when it ends, and with which groups
(``scheduling/partial.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rollouts.dispatch import Ended, Event, Follower, Paused, Scored, Task, worker_name
from megatron_rl.rollouts.partial_groups import PartialGroups
from megatron_rl.scheduling.partial import PartialStep
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Sampling, Score


@dataclass(frozen=True)
class PartialOrder:
    """What is to be sampled in a step: what is open is to go on."""

    groups: PartialGroups
    step: int
    sampling: Sampling
    what: str  # this generation, where its progress is shown

    def prompts(self, number: int) -> Prompt:
        return self.groups[number].prompt

    def sampling_of(self, number: int) -> Sampling:
        return self.sampling

    def so_far(self, request: Request) -> Completion | None:
        """What a response has from earlier steps."""
        return self.groups.so_far(request)

    def dispatcher(self, num_replicas: int, capacity: int) -> PartialDispatcher:
        return PartialDispatcher(self, num_replicas, capacity)


@dataclass(frozen=True)
class PartialOutcome:
    """How a step of partial rollouts has ended; equal on every rank. ``ended``: the responses that
    came to their ends in it, not beyond its level."""

    step: PartialStep
    ended: Mapping[Request, tuple[Ended, Score]]
    unused_tokens: int  # sampled beyond the level


class PartialDispatcher(Follower):
    """One step. It ends when its level is known and what has ended below it is judged."""

    def __init__(self, order: PartialOrder, num_replicas: int, capacity: int) -> None:
        self._groups = order.groups
        self._scheduler = order.groups.scheduler(order.step)
        super().__init__(self._scheduler.queue, self._scheduler.age)
        self._ended: dict[Request, Ended] = {}
        self._scores: dict[Request, Score] = {}
        self._replicas = range(num_replicas)
        self._told_limit: int | None = None
        for replica in self._replicas:
            self._scheduler.queue.join(worker_name(replica), capacity, order.step)

    def hear(self, event: Event) -> None:
        if isinstance(event, Ended):
            worker = worker_name(event.replica)
            if self._scheduler.finished(worker, event.request, self._num_new(event)):
                self._ended[event.request] = event
                self._num_done += 1
        elif isinstance(event, Paused):
            self._scheduler.paused(worker_name(event.replica), event.request)
        elif isinstance(event, Scored):
            self._scores[event.request] = event.score
        else:
            self._standing[event.replica] = event

    def _num_new(self, event: Ended) -> int:
        """Tokens of this step."""
        return event.length - self._groups.length(event.request)

    def tasks(self) -> Mapping[int, Task]:
        """What is new for each replica."""
        tasks: dict[int, Task] = {}
        limit = self._scheduler.limit
        if limit != self._told_limit:
            tasks = {replica: Task([], [], limit=limit) for replica in self._replicas}
            self._told_limit = limit
        while assigned := self._scheduler.assign():
            for worker, request in assigned:
                if limit == 0:
                    self._scheduler.paused(worker, request)
                else:
                    tasks.setdefault(int(worker), Task([], [])).begin.append(request)
        if self._is_over():
            return {replica: Task([], [], is_end=True) for replica in self._replicas}
        return tasks

    def _is_over(self) -> bool:
        return self._scheduler.is_ready and self._counting().keys() <= self._scores.keys()

    def _counting(self) -> dict[Request, Ended]:
        """What has ended and counts, by what is known of the level."""
        limit = self._scheduler.limit
        assert limit is not None, "asked when the level is known"
        return {
            request: event
            for request, event in sorted(self._ended.items())
            if self._num_new(event) <= limit
        }

    def outcome(self, sampled_tokens: int) -> PartialOutcome:
        """When the step is over. ``sampled_tokens``: by all replicas, used or not."""
        counting = self._counting()
        taken = self._scheduler.take()
        used = sum(map(self._num_new, counting.values()))
        for number in self._groups:
            for response in range(self._groups.rules.responses_per_group):
                answer = self._groups[number].answers.get(response)
                is_ended = answer is not None and answer.score is not None
                if not is_ended and Request(taken.step, number, response) not in counting:
                    used += taken.level
        ended = {request: (event, self._scores[request]) for request, event in counting.items()}
        return PartialOutcome(taken, ended, sampled_tokens - used)
