"""What rank 0 does while all ranks generate: it holds the scheduler, hears of answers and verdicts,
and tells every replica what to begin and what to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.runtime.display import Progress
from megatron_rl.scheduling.batches import Batch, KeptShare, Rules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request, WorkQueue
from megatron_rl.types import Completion, Prompt, Sampling, Score


@dataclass(frozen=True)
class Order:
    """What is to be sampled. ``prompts``: by number, the same on every rank. ``wants``: whether a
    group with these correct responses is trained on. ``kept_share``: of earlier steps; it changes
    how many groups are sampled ahead, and nothing else."""

    rules: Rules
    prompts: Callable[[int], Prompt]
    sampling: Sampling
    what: str  # this generation, where its progress is shown
    wants: Callable[[Sequence[bool]], bool] = lambda correct: True
    kept_share: KeptShare | None = None
    # How a prompt is sampled, where not all are alike.
    changed: Callable[[Prompt, Sampling], Sampling] | None = None

    def sampling_of(self, number: int) -> Sampling:
        """Of the prompt with this number."""
        if self.changed is None:
            return self.sampling
        return self.changed(self.prompts(number), self.sampling)

    def so_far(self, request: Request) -> Completion | None:
        """What a response has from earlier."""
        return None

    def dispatcher(self, num_replicas: int, capacity: int) -> Dispatcher:
        return Dispatcher(self, num_replicas, capacity)


class Ended(NamedTuple):
    """A replica has a response; its tokens stay there."""

    replica: int
    request: Request
    length: int
    truncated: bool
    weight_version: int


class Paused(NamedTuple):
    """A response does not go on in this generation; its tokens stay on the replica."""

    replica: int
    request: Request


class Scored(NamedTuple):
    """The verdict on a response that this replica has."""

    replica: int
    request: Request
    score: Score


class Standing(NamedTuple):
    """How far a replica is: tokens that it has sampled, and the longest response still running."""

    replica: int
    num_tokens: int
    longest: int


class Task(NamedTuple):
    """What a replica is to begin and to stop; at the end of a generation it stops everything.
    ``limit``: it pauses a response that has got so many tokens in this generation; None: as
    before."""

    begin: list[Request]
    stop: list[Request]
    is_end: bool = False
    limit: int | None = None


Event = Ended | Paused | Scored | Standing


@dataclass(frozen=True)
class Outcome:
    """The responses of a generation, in canonical order, without their tokens; equal on every rank.

    ``groups``: prompt number of each group. Of each response: the replica that has it, its length,
    whether it is truncated, the version of its weights, its score. ``end``: prompts before this
    number were looked at; ``num_refused``: of these, groups that were not wanted. Where none was
    wanted the groups are those that were looked at last, for the log.
    """

    groups: Sequence[int]
    replicas: Sequence[int]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    weight_versions: Sequence[int]
    scores: Sequence[Score]
    end: int
    num_wanted: int
    num_refused: int
    unused_tokens: int  # sampled for a response that is not among these


class Follower:
    """How far the work of a queue is. Rank 0 has it."""

    def __init__(self, queue: WorkQueue, age: int = 0) -> None:
        """``age``: of the oldest response that is gone on with, in updates."""
        self._queue = queue
        self._age = age
        self._standing: dict[int, Standing] = {}
        self._num_done = 0

    @property
    def only_judges(self) -> bool:
        """Whether all that is wanted so far is sampled."""
        return self._queue.num_running + self._queue.num_waiting == 0

    @property
    def progress(self) -> Progress:
        queue = self._queue
        return Progress(
            num_done=self._num_done,
            num_wanted=self._num_done + queue.num_running + queue.num_waiting,
            num_tokens=sum(standing.num_tokens for standing in self._standing.values()),
            longest=max((standing.longest for standing in self._standing.values()), default=0),
            age=self._age,
        )


class Dispatcher(Follower):
    """One generation. What it decides from the contents of responses alone is said in
    ``scheduling.batches``; where they are sampled follows from who is free."""

    def __init__(self, order: Order, num_replicas: int, capacity: int) -> None:
        self._order = order
        self._scheduler = Scheduler(order.rules, kept_share=order.kept_share)
        super().__init__(self._scheduler.queue)
        self._ended: dict[Request, Ended] = {}
        self._scores: dict[Request, Score] = {}
        self._num_replicas = num_replicas
        for replica in range(num_replicas):
            self._scheduler.join(worker_name(replica), capacity, 0)

    def hear(self, event: Event) -> None:
        if isinstance(event, Standing):
            self._standing[event.replica] = event
        elif isinstance(event, Ended):
            if self._scheduler.finished(worker_name(event.replica), event.request):
                self._ended[event.request] = event
                self._num_done += 1
        elif isinstance(event, Scored):
            self._note(event)

    def _note(self, event: Scored) -> None:
        """A verdict; with the last one of a group the group is judged."""
        ended = self._ended.get(event.request)
        if ended is None or ended.replica != event.replica:
            return
        self._scores[event.request] = event.score
        version, group, _ = event.request
        scores = [self._scores.get(request) for request in self._requests(version, group)]
        judged = [score for score in scores if score is not None]
        if len(judged) == len(scores):
            wanted = self._order.wants([score.correct for score in judged])
            self._scheduler.judged(version, group, wanted=wanted)

    def tasks(self) -> Mapping[int, Task]:
        """What is new for each replica."""
        if self._scheduler.is_ready:
            return {replica: Task([], [], is_end=True) for replica in range(self._num_replicas)}
        tasks: dict[int, Task] = {}
        for worker, request in self._scheduler.to_abort():
            tasks.setdefault(int(worker), Task([], [])).stop.append(request)
        for worker, request in self._scheduler.assign():
            tasks.setdefault(int(worker), Task([], [])).begin.append(request)
        return tasks

    def outcome(self, sampled_tokens: int) -> Outcome:
        """When it is ready. ``sampled_tokens``: by all replicas, used or not."""
        batch = self._scheduler.take()
        groups = batch.groups or self._last_refused(batch)
        requests: list[Request] = []
        for group in groups:
            requests += self._requests(0, group)
        ended = [self._ended[request] for request in requests]
        return Outcome(
            groups=groups,
            replicas=[each.replica for each in ended],
            lengths=[each.length for each in ended],
            truncated=[each.truncated for each in ended],
            weight_versions=[each.weight_version for each in ended],
            scores=[self._scores[request] for request in requests],
            end=batch.start + batch.admitted,
            num_wanted=len(batch.groups),
            num_refused=batch.num_refused,
            unused_tokens=sampled_tokens - sum(each.length for each in ended),
        )

    def _last_refused(self, batch: Batch) -> list[int]:
        end = batch.start + batch.admitted
        return list(range(max(batch.start, end - self._order.rules.groups_per_step), end))

    def _requests(self, version: int, group: int) -> list[Request]:
        num_responses = self._order.rules.responses_per_group
        return [Request(version, group, response) for response in range(num_responses)]


def worker_name(replica: int) -> str:
    return f"{replica:06d}"  # in the order of numbers
