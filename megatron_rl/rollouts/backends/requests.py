"""Requests of one job to servers: the steps of a run, or answers to other prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_rl.engine.serving.client import ServerClient, ServerLostError
from megatron_rl.rollouts.backends.failures import Asked, RequestFailures, RequestTimeouts
from megatron_rl.rollouts.backends.loop_thread import LoopThread
from megatron_rl.rollouts.dispatcher import (
    Dispatcher,
    Ended,
    Event,
    GenerationRequest,
    Scored,
    Unfinished,
)
from megatron_rl.rollouts.environments.outcomes import Outcome, appended, turns_of
from megatron_rl.rollouts.environments.turns import Turns, Waiting
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.reward_thread import RewardThread, Unscored
from megatron_rl.rollouts.store import joined
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Sampling, Score


def check_versions(request: Request, completion: Completion, *, exact: bool) -> None:
    """Raises ValueError for a response of older weights, or, where ``exact``, of any others."""
    versions = [span.version for span in completion.spans]
    wrong = versions != [request.version] if exact else min(versions) < request.version
    if wrong:
        raise ValueError(
            f"a response that was to be sampled with weights version {request.version}"
            f"{'' if exact else ' or newer'} comes from {versions}; another program may have"
            " sent weights to a server of this run"
        )


@dataclass(frozen=True)
class ServerParts:
    """What the backend of servers is made of.

    Attributes:
        connect: A client for a URL.
        switch: Makes the server at a URL use a version that it has staged; raises ConnectionError
            where it does not.
        rewards: Makes the thread that scores responses, from what that thread is to call when some
            are scored.
        capacity: Requests that a server is sent at a time.
        timeouts: How long one of them may take.
        longest_response: In tokens.
        turns: None where a response has a single turn.
    """

    connect: Callable[[str], ServerClient]
    switch: Callable[[str, int], None]
    rewards: Callable[[Callable[[], None]], RewardThread]
    capacity: int
    timeouts: RequestTimeouts
    longest_response: int
    turns: Turns | None = None


@dataclass(frozen=True)
class AskedTurns:
    """Asks environments for the requests of all jobs. For the backend's thread alone."""

    turns: Turns

    async def outcome(self, waiting: Waiting) -> Outcome:
        """Outcome of a turn that a server has ended; replaces the key of ``waiting``."""
        if not self.turns.asks(waiting.whole):
            return self.turns.ended(waiting.whole)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.turns.give(waiting._replace(key=answer))
        self.take()  # starts a call, unless one is running
        return await answer

    def take(self) -> None:
        """Wakes the requests whose environment has answered."""
        for answer, outcome in self.turns.take():
            assert isinstance(answer, asyncio.Future), "see outcome"
            if not answer.done():  # else the request was taken back meanwhile
                answer.set_result(outcome)


@dataclass(frozen=True)
class ServerFleet:
    """The servers at work, shared by the requests of all jobs. For the backend's thread alone.

    Attributes:
        clients: By server name; the backend adds and removes them.
        note_failure: Called when a server has not answered a request; it may call
            ``ServerRequests.lost``.
        turn: Has every dispatcher take its turn.
        asked_turns: None where a response has a single turn.
    """

    parts: ServerParts
    thread: LoopThread
    rewards: RewardThread
    failures: RequestFailures
    note_failure: Callable[[str, Asked, ServerLostError], None]
    turn: Callable[[], None]
    asked_turns: AskedTurns | None = None
    clients: dict[str, ServerClient] = field(default_factory=dict)


class ServerRequests:
    """Implements ``GenerationBackend`` for one job. For the backend's thread alone."""

    def __init__(self, job: GenerationJob, scheduler: Scheduler, fleet: ServerFleet) -> None:
        self.job = job
        self.scheduler = scheduler
        self.dispatcher = Dispatcher(job, scheduler, self, fleet.rewards)
        self.num_tokens = 0  # of all answers
        self.num_reissued = 0
        self._fleet = fleet
        self._running: dict[tuple[str, Request], asyncio.Task] = {}
        self._events: list[Event] = []
        self._level: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def join(self, name: str, version: int) -> None:
        """A server takes requests of this job."""
        self.scheduler.queue.join(name, self._fleet.parts.capacity, version)

    def lost(self, name: str) -> list[Asked]:
        """Takes back the requests of a server that is marked dead, for others; returns them."""
        unanswered = [request for worker, request in self._running if worker == name]
        self.scheduler.queue.leave(name)
        for request in unanswered:
            self.abort(name, request)
        self.num_reissued += len(unanswered)
        return [self._asked(request) for request in unanswered]

    def note_score(self, one: Unscored, score: Score) -> None:
        """Takes the score of a response of any job. Where a group was dropped meanwhile and
        admitted again, another completion is in its place: the score is then ignored."""
        if self.job.store.get(one.request.place) is one.completion:
            self._events.append(Scored(one.request, score))

    def end(self) -> None:
        """Aborts all requests: the job needs no more of them."""
        for worker, request in list(self._running):
            self.abort(worker, request)

    # See GenerationBackend

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        work = self._fleet.thread.spawn(self._request(worker, wanted))
        self._running[worker, wanted.request] = work

    def abort(self, worker: str, request: Request) -> None:
        work = self._running.pop((worker, request), None)
        if work is not None:
            work.cancel()

    def pause(self, level: int) -> None:
        """See GenerationBackend. Requests check the level when their next tokens arrive."""
        self._level = level

    def events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def holder(self, worker: str | None, group: int) -> int:
        return 0

    def _asked(self, request: Request) -> Asked:
        visit = self.job.stream.visit(request.group)
        return self.job.stream.prompt(request.group, visit).uid, request.response

    async def _request(self, worker: str, wanted: GenerationRequest) -> None:
        request, fleet = wanted.request, self._fleet
        prompt = self.job.stream.prompt(request.group, wanted.visit)
        asked = prompt.uid, request.response
        try:
            whole, outcome, is_paused = await self._response(worker, wanted, prompt)
        except ServerLostError as error:
            # Before the failure is noted: if it ends the server, ``lost`` must not find this one.
            self._running.pop((worker, request), None)
            self.num_reissued += 1
            self._events.append(Unfinished(worker, request, is_paused=False))
            fleet.note_failure(worker, asked, error)
            fleet.turn()
            return
        fleet.failures.answered(worker, asked)
        self._running.pop((worker, request), None)
        self.job.store.put(request.place, whole)
        if is_paused:
            self._events.append(Unfinished(worker, request, is_paused=True))
        else:
            self._events.append(Ended.of(worker, request, whole, outcome))
            fleet.rewards.give(request, prompt, whole, outcome)
        fleet.turn()

    async def _response(
        self, worker: str, wanted: GenerationRequest, prompt: Prompt
    ) -> tuple[Completion, Outcome | None, bool]:
        """A whole response, the outcome of its environment, and whether it continues in the next
        step. One server samples all of its turns: another server begins with the first."""
        request, began_s = wanted.request, time.monotonic()
        got = self.job.store.held(request.place)
        asked_turns = self._fleet.asked_turns
        while True:
            turn = 0 if got is None else len(turns_of(got)) - 1
            sampling = self.job.plan(wanted.step, prompt, request.version, turn)
            # Where a turn ended with an earlier step the environment is asked first.
            if got is None or asked_turns is None or not asked_turns.turns.asks(got):
                new, is_paused = await self._sampled(worker, wanted, prompt, sampling, got)
                got = joined(got, new)
                if is_paused:
                    return got, None, True
                if asked_turns is None:
                    return got, None, False
            most = sampling.max_response_tokens
            step = wanted.step if self.job.is_training else None
            waiting = Waiting(0, step, prompt, request.response, got, most, began_s)
            outcome = await asked_turns.outcome(waiting)
            if outcome.is_over:
                return replace(got, truncated=got.truncated or outcome.truncated), outcome, False
            got = appended(got, outcome.tokens)

    async def _sampled(
        self,
        worker: str,
        wanted: GenerationRequest,
        prompt: Prompt,
        sampling: Sampling,
        got: Completion | None,
    ) -> tuple[Completion, bool]:
        """What a server samples after the tokens of ``got``, and whether the level of the step has
        ended it."""
        request, fleet = wanted.request, self._fleet
        client = fleet.clients[worker]
        so_far = () if got is None else got.token_ids
        begin = wanted.begin + len(so_far) - self.job.store.length(request.place)

        def is_enough(num_tokens: int) -> bool:
            """Whether the response has reached the level of its step."""
            return self._level is not None and begin + num_tokens >= self._level

        with fleet.parts.timeouts.waiting(worker, sampling.max_response_tokens) as answered:
            if self.job.rules.is_partial:
                new, is_paused = await client.generate_until(
                    prompt, sampling, request.response, so_far, is_enough
                )
                if is_paused:  # the server names no version then: in lockstep the one asked for
                    new = replace(new, weight_version=request.version, spans=())
            else:
                new = await client.generate(prompt, sampling, request.response, so_far)
                is_paused = False
            answered(len(new.token_ids))
        self.num_tokens += len(new.token_ids)
        check_versions(request, new, exact=self.job.rules.lockstep)
        return new, is_paused

    def step_is_taken(self) -> None:
        """The next step has another level."""
        self._level = None
