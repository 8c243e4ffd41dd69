"""Generation in the training processes: every rank drives its part of an engine, rank 0 hands out
the work.

Who agrees with whom, and how:

- Rank 0 alone has the scheduler. It hears of ended responses and of verdicts, and answers with
  tasks, by mail (``runtime/mail.py``): no replica waits for another one before the end.
- The ranks of one replica must make the same calls of the engine in the same order. In each turn
  the first of them reads the mail and broadcasts it to the others; then all begin and stop the same
  responses and work the same number of steps. Each judges its share of what has ended.
- Prompts are not sent: group n is the n-th prompt of this generation on every rank.
- When rank 0 says that the step has its groups, every replica stops what still runs, and one
  collective gives all ranks the same ``Outcome``.

None of this changes what is sampled or trained: see ``scheduling/batches.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_rl.protocols import Answers
from megatron_rl.rollouts.dispatch import Ended, Event, Paused, Scored, Standing, Task
from megatron_rl.rollouts.judge import Judge
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.rollouts.ownership import Ranks
from megatron_rl.rollouts.partial_groups import joined
from megatron_rl.runtime.display import Display, Progress
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.mail import Mail
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Sampling

_TO_MAIN = "rank 0"
_STANDING_EVERY_S = 1.0
# Who finds nothing to do waits before the next look, twice as long each time, between these bounds.
_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.1


Result = TypeVar("Result", covariant=True)


class Dispatching(Protocol[Result]):
    """What rank 0 does in one generation; see ``dispatch.Dispatcher``."""

    @property
    def only_judges(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    def hear(self, event: Event) -> None: ...

    def tasks(self) -> Mapping[int, Task]: ...

    def outcome(self, sampled_tokens: int) -> Result: ...


class Ordered(Protocol[Result]):
    """What is to be sampled in one generation; see ``dispatch.Order``."""

    @property
    def prompts(self) -> Callable[[int], Prompt]: ...

    @property
    def what(self) -> str: ...

    def sampling_of(self, number: int) -> Sampling: ...

    def so_far(self, request: Request) -> Completion | None: ...

    def dispatcher(self, num_replicas: int, capacity: int) -> Dispatching[Result]: ...


class Replica:
    """This rank's part of one generation: what it has begun, and the completions it has; of those
    that are ``paused`` the tokens so far."""

    def __init__(self, engine: Answers, judge: Judge, number: int, num_ranks: int) -> None:
        """``number``: of this rank among the ``num_ranks`` of its replica."""
        self.completions: dict[Request, Completion] = {}
        self.paused: dict[Request, Completion] = {}
        self.num_tokens = 0  # sampled, of all responses that are no longer running
        self._engine = engine
        self._judge = judge
        self._number = number
        self._num_ranks = num_ranks
        self._requests: dict[int, Request] = {}  # by request_id, of what runs
        self._told_standing = time.monotonic()
        self._limit: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def obey(self, task: Task, order: Ordered[Any]) -> None:
        """Begins and stops."""
        if task.limit is not None:
            self._limit = task.limit
        stop = set(task.stop)
        if task.is_end:
            stop.update(self._requests.values())
        request_ids = [
            request_id for request_id, request in self._requests.items() if request in stop
        ]
        self.num_tokens += self._engine.abort(request_ids)
        for request_id in request_ids:
            del self._requests[request_id]
        by_group: dict[int, list[Request]] = {}
        for request in task.begin:
            by_group.setdefault(request.group, []).append(request)
        for group, requests in by_group.items():
            responses = [request.response for request in requests]
            there = {request.response: order.so_far(request) for request in requests}
            so_far = {number: each.token_ids for number, each in there.items() if each is not None}
            sampling = order.sampling_of(group)
            request_ids = self._engine.submit(order.prompts(group), responses, sampling, so_far)
            self._requests.update(zip(request_ids, requests, strict=True))

    def work(self, order: Ordered[Any]) -> list[Event]:
        """The engine works for a moment; what rank 0 is to hear of it from this rank."""
        events: list[Event] = []
        replica = self._engine.replica
        for request_id, new in self._engine.poll() if self._requests else ():
            request = self._requests.pop(request_id)
            completion = joined(order.so_far(request), new)
            if len(self.completions) % self._num_ranks == self._number:
                self._judge.give(request, order.prompts(request.group), completion)
            self.completions[request] = completion
            self.num_tokens += len(new.token_ids)
            if self._number == 0:
                facts = (completion.truncated, completion.weight_version)
                events.append(Ended(replica, request, len(completion.token_ids), *facts))
        paused = self._pause(order)
        if self._number == 0:
            events += [Paused(replica, request) for request in paused]
        events += [Scored(replica, request, score) for request, score in self._judge.take()]
        now = time.monotonic()
        if self._number == 0 and (events or now > self._told_standing + _STANDING_EVERY_S):
            self._told_standing = now
            lengths = self._engine.running_lengths()
            num_tokens = self.num_tokens + sum(lengths.values())
            events.append(Standing(replica, num_tokens, max(lengths.values(), default=0)))
        return events

    def _pause(self, order: Ordered[Any]) -> list[Request]:
        """Ends what has come to the limit of this generation, and keeps its tokens."""
        if self._limit is None:
            return []
        lengths = self._engine.running_lengths()
        request_ids = [
            request_id for request_id in self._requests if lengths[request_id] >= self._limit
        ]
        if not request_ids:
            return []
        requests = [self._requests.pop(request_id) for request_id in request_ids]
        for request, new in zip(requests, self._engine.pause(request_ids), strict=True):
            self.paused[request] = joined(order.so_far(request), new)
            self.num_tokens += len(new.token_ids)
        return requests


class Streaming:
    """Generations of a launch, one after the other."""

    def __init__(self, engine: Answers, judge: Judge, world: World, display: Display) -> None:
        self._engine = engine
        self._judge = judge
        self._world = world
        self._display = display
        self._mail = Mail(world)
        self._ranks_per_replica = world.size // engine.num_replicas
        self._team: Any = None  # of the ranks of a replica, made when it is needed first

    @property
    def leaders(self) -> Ranks:
        """The first rank of each replica."""
        return np.arange(0, self._world.size, self._ranks_per_replica)

    @property
    def leader(self) -> int:
        """The first rank of this replica."""
        return int(self.leaders[self._engine.replica])

    def run(self, order: Ordered[Result], clock: Clock) -> tuple[Result, Replica]:
        """Collective. The clock counts as ``reward`` the time in which all is sampled and verdicts
        are waited for, which rank 0 knows, and as ``rollout`` the rest."""
        world = self._world
        number = world.rank - self.leader
        replica = Replica(self._engine, self._judge, number, self._ranks_per_replica)
        dispatcher: Dispatching[Result] | None = None
        if world.is_main:
            dispatcher = order.dispatcher(self._engine.num_replicas, self._engine.capacity)
        clock.add({"rollout": 0.0, "reward": 0.0})  # a metric of every step, also where it is 0
        with self._display.phase(f"{order.what}: generating", announced=False):
            self._generate(order, replica, dispatcher, clock)
        self._judge.forget()
        with clock("rollout"):
            sampled = world.all_gather(replica.num_tokens if number == 0 else 0)
            outcome = world.from_main(partial(_outcome, dispatcher, sum(sampled)))
        if world.is_main:
            self._mail.receive(_TO_MAIN)  # of responses that came too late to count
        return outcome, replica

    def _generate(
        self,
        order: Ordered[Any],
        replica: Replica,
        dispatcher: Dispatching[Any] | None,
        clock: Clock,
    ) -> None:
        """One turn after the other, until rank 0 says that it is over."""
        report = self._display.generating(order.what)
        pause_s = _SHORTEST_PAUSE_S
        is_over = False
        while not is_over:
            with clock("reward" if dispatcher and dispatcher.only_judges else "rollout"):
                has_heard = False
                if dispatcher is not None:
                    has_heard = self._dispatch(dispatcher)
                    report(dispatcher.progress)
                tasks = self._next_tasks()
                for task in tasks:
                    replica.obey(task, order)
                is_over = any(task.is_end for task in tasks)
                events = replica.work(order)
                if events:
                    self._mail.send(_TO_MAIN, events)
                if has_heard or tasks or events or replica.is_busy:
                    pause_s = _SHORTEST_PAUSE_S
                elif self._world.rank == self.leader:  # the others wait for its broadcast
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _dispatch(self, dispatcher: Dispatching[Any]) -> bool:
        """Rank 0: what has come, and what follows from it; whether anything has."""
        letters = self._mail.receive(_TO_MAIN)
        for events in letters:
            for event in events:
                dispatcher.hear(event)
        for replica, task in dispatcher.tasks().items():
            self._mail.send(_box(replica), task)
        return bool(letters)

    def _next_tasks(self) -> list[Task]:
        """What this replica is to do, in order: equal on all of its ranks."""
        tasks: list[Task] = []
        if self._world.rank == self.leader:
            tasks = self._mail.receive(_box(self._engine.replica))
        if self._ranks_per_replica == 1:
            return tasks
        if self._team is None:
            self._team = self._world.team(self._ranks_per_replica)
        carried: list[Any] = [tasks]
        dist.broadcast_object_list(carried, src=self.leader, group=self._team)
        return carried[0]


def _outcome(dispatcher: Dispatching[Result] | None, sampled_tokens: int) -> Result:
    assert dispatcher is not None, "rank 0 has it"
    return dispatcher.outcome(sampled_tokens)


def _box(replica: int) -> str:
    return f"replica {replica}"
