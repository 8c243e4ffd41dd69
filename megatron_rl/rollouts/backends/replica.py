"""A rank's part of one generation with the engines of a launch: what runs, where its tokens go."""

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_rl.protocols import Generator
from megatron_rl.rollouts.dispatcher import (
    Ended,
    Event,
    GenerationRequest,
    Scored,
    Unfinished,
    WorkerProgress,
)
from megatron_rl.rollouts.environments.outcomes import Outcome, appended, turns_of
from megatron_rl.rollouts.environments.turns import Turns, Waiting
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.store import joined
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion

_PROGRESS_EVERY_S = 1.0


@dataclass
class ReplicaTask:
    """What a replica is to begin and to stop; at the end of a generation it stops everything.
    ``level``: see ``GenerationBackend.pause``; None: unchanged. ``outcomes``: answers of
    environments, which the replica's first rank has asked."""

    begin: list[GenerationRequest] = field(default_factory=list)
    stop: list[Request] = field(default_factory=list)
    is_end: bool = False
    level: int | None = None
    outcomes: list[tuple[Hashable, Outcome]] = field(default_factory=list)


class Open(NamedTuple):
    """A response that runs here.

    Attributes:
        began_s: By ``time.monotonic``.
        got: Its tokens from earlier steps and turns.
    """

    wanted: GenerationRequest
    began_s: float
    got: Completion | None = None


@dataclass
class Replica:
    """This rank's part of one generation: what runs here, and where its tokens go.

    Attributes:
        number: This rank's number among the ``num_ranks`` of its replica.
        turns: None where a response has a single turn.
        num_tokens: Tokens sampled for all responses that are no longer running.
    """

    engine: Generator
    rewards: RewardThread
    job: GenerationJob
    number: int
    num_ranks: int
    turns: Turns | None = None
    num_tokens: int = 0
    _num_ended: int = 0
    _running: dict[int, Open] = field(default_factory=dict)  # by the engine's request id
    # Responses whose environment is asked, by a number that is equal on all ranks of the replica.
    _waiting: dict[Hashable, Open] = field(default_factory=dict)
    _num_asked: int = 0
    _events: list[Event] = field(default_factory=list)  # sent by the next ``work``
    _progress_sent_s: float = field(default_factory=time.monotonic)
    _level: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def apply(self, task: ReplicaTask) -> None:
        if task.level is not None:
            self._level = task.level
        stop = set(task.stop)
        running = self._running.items()
        stopped = [number for number, one in running if task.is_end or one.wanted.request in stop]
        self.num_tokens += self.engine.abort(stopped)
        for number in stopped:
            del self._running[number]
        waiting = self._waiting.items()
        for key in [key for key, one in waiting if task.is_end or one.wanted.request in stop]:
            del self._waiting[key]
        now = time.monotonic()
        held = self.job.store.held
        begun = [Open(wanted, now, held(wanted.request.place)) for wanted in task.begin]
        # Outcomes of responses that were stopped meanwhile are dropped.
        answered = [each for each in task.outcomes if each[0] in self._waiting]
        begun += [one for each in answered if (one := self._follow(*each)) is not None]
        self._begin(begun)

    def _follow(self, key: Hashable, outcome: Outcome) -> Open | None:
        """A response whose environment has answered, for its next turn; None: it has ended."""
        one = self._waiting.pop(key)
        assert one.got is not None, "it has sampled a turn"
        if outcome.is_over:
            self._end(one, one.got, outcome)
            return None
        return one._replace(got=appended(one.got, outcome.tokens))

    def _begin(self, begun: Sequence[Open]) -> None:
        """Responses of one group and turn are submitted together: their sampling is the same. Where
        a turn ended with an earlier step the environment is asked first."""
        together: dict[tuple[int, int], list[Open]] = defaultdict(list)
        for one in begun:
            if one.got is not None and self.turns is not None and self.turns.asks(one.got):
                self._ask(one)
                continue
            turn = 0 if one.got is None else len(turns_of(one.got)) - 1
            together[one.wanted.request.group, turn].append(one)
        for (group, turn), several in together.items():
            first = several[0].wanted
            prompt = self.job.stream.prompt(group, first.visit)
            sampling = self.job.plan(first.step, prompt, first.request.version, turn)
            got = {one.wanted.request.response: one.got for one in several}
            so_far = {response: there.token_ids for response, there in got.items() if there}
            numbers = self.engine.submit(prompt, list(got), sampling, so_far)
            self._running.update(zip(numbers, several, strict=True))

    def work(self) -> list[Event]:
        """Has the engine work for a moment; returns the events that this rank sends to rank 0."""
        worker = worker_name(self.engine.replica)
        for number, new in self.engine.poll() if self._running else ():
            one = self._running.pop(number)
            self.num_tokens += len(new.token_ids)
            self._turn_ended(one, joined(one.got, new))
        paused = self._pause()
        if self.number == 0:
            self._events += [Unfinished(worker, request, is_paused=True) for request in paused]
        events, self._events = self._events, []
        events += [Scored(one.request, score) for one, score in self.rewards.take()]
        now = time.monotonic()
        if self.number == 0 and (events or now > self._progress_sent_s + _PROGRESS_EVERY_S):
            self._progress_sent_s = now
            lengths = self.engine.running_lengths()
            num_tokens = self.num_tokens + sum(lengths.values())
            events.append(WorkerProgress(worker, num_tokens, max(lengths.values(), default=0)))
        return events

    def _turn_ended(self, one: Open, got: Completion) -> None:
        """``got``: all of the response."""
        if self.turns is None:
            self._end(one, got, None)
        elif not self.turns.asks(got):
            self._end(one, got, self.turns.ended(got))
        else:
            self._ask(one._replace(got=got))

    def _ask(self, one: Open) -> None:
        """Has the replica's first rank ask the environment of a response."""
        self._num_asked += 1
        self._waiting[self._num_asked] = one
        if self.number == 0:
            assert self.turns is not None and one.got is not None, "a turn has ended"
            (request, step, visit, _), got = one.wanted, one.got
            prompt = self.job.stream.prompt(request.group, visit)
            most = self.job.plan.of_step(step).max_response_tokens
            step = step if self.job.is_training else None
            key, response = self._num_asked, request.response
            self.turns.give(Waiting(key, step, prompt, response, got, most, one.began_s))

    def _end(self, one: Open, got: Completion, outcome: Outcome | None) -> None:
        request = one.wanted.request
        if outcome is not None and outcome.truncated:
            got = replace(got, truncated=True)
        self.job.store.put(request.place, got)
        if self._num_ended % self.num_ranks == self.number:
            prompt = self.job.stream.prompt(request.group, one.wanted.visit)
            self.rewards.give(request, prompt, got, outcome)
        self._num_ended += 1
        if self.number == 0:
            self._events.append(Ended.of(worker_name(self.engine.replica), request, got))

    def _pause(self) -> list[Request]:
        """Ends responses that have reached the level of the step, and keeps their tokens."""
        if self._level is None:
            return []
        lengths = self.engine.running_lengths()
        numbers = []
        for number, one in self._running.items():
            got = 0 if one.got is None else len(one.got.token_ids)
            begin = one.wanted.begin - self.job.store.length(one.wanted.request.place)
            if begin + got + lengths[number] >= self._level:
                numbers.append(number)
        if not numbers:
            return []
        paused = [self._running.pop(number) for number in numbers]
        for one, new in zip(paused, self.engine.pause(numbers), strict=True):
            self.job.store.put(one.wanted.request.place, joined(one.got, new))
            self.num_tokens += len(new.token_ids)
        return [one.wanted.request for one in paused]


def worker_name(replica: int) -> str:
    return f"{replica:06d}"  # in the order of numbers
