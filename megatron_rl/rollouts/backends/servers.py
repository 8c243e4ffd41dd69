"""Rank 0's thread that keeps servers busy while the policy trains.

The dispatcher says what is to be sampled; this sends it to servers, has what comes back rewarded,
and marks servers dead that fail. All of its state belongs to the thread; the methods of
``ServerBackend`` for the main thread hand work over to it and wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from megatron_rl.rollouts.backends.auxiliary import AUXILIARY, AuxiliaryRequests
from megatron_rl.rollouts.backends.failures import Asked, RequestFailures
from megatron_rl.rollouts.backends.loop_thread import LoopThread
from megatron_rl.rollouts.backends.readiness import FleetReadiness
from megatron_rl.rollouts.backends.server_parts import (
    Client,
    FleetEvent,
    ServerParts,
    ServerRegistry,
    check_versions,
    stamped,
)
from megatron_rl.rollouts.backends.switches import StagedWeightSwitcher
from megatron_rl.rollouts.dispatcher import (
    Dispatcher,
    Ended,
    Event,
    Failed,
    GenerationRequest,
    Paused,
    Scored,
)
from megatron_rl.rollouts.jobs import TrainingJob
from megatron_rl.rollouts.rollouts import SampledStep
from megatron_rl.runtime.display import Progress
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score

LOOK_EVERY_S = 0.5
logger = logging.getLogger(__name__)


class ServerBackend:
    """Implements ``GenerationBackend`` by requests to vLLM servers. For rank 0."""

    def __init__(
        self,
        job: TrainingJob,
        parts: ServerParts,
        registry: ServerRegistry,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """``saved``: the ``state`` to resume from; its tokens are in the job's store already."""
        self._job = job
        self._parts = parts
        self._registry = registry
        self._thread = LoopThread("dispatcher")
        self._rewards = parts.rewards(lambda: self._thread.soon(self._turn))
        scheduler = Scheduler(job.rules, version=-1)
        if saved is not None:
            scheduler = Scheduler.restored(job.rules, saved["scheduler"])
        self._scheduler = scheduler
        self._dispatcher = Dispatcher(job, scheduler, self, self._rewards)
        self._clients: dict[str, Client] = {}
        self._urls: dict[str, str] = {}
        self._failures = RequestFailures()
        self._switches = StagedWeightSwitcher(parts.switch, scheduler)
        self._readiness = FleetReadiness(self._dispatcher, self._switches, self._urls, self._recall)
        newest = partial(self._thread.until, self._readiness.newest)
        self._auxiliary = AuxiliaryRequests(
            parts, self._rewards, self._clients, self._failures, (newest, self._note_failure)
        )
        self._running: dict[tuple[str, Request], asyncio.Task] = {}
        self._events: list[Event] = []
        self._level: int | None = None
        self._num_reissued = 0
        self._dead: set[str] = set()  # no other start of a server has its name
        self._num_tokens = 0  # of all answers
        self._thread.call(self._start(saved))

    # From the main thread

    def wait(self, report: Callable[[Progress], None] | None = None) -> Literal[True] | FleetEvent:
        """Until the next step has its groups, a server wants to join, or none is left to work: the
        last is reported once. ``report`` is given the progress of all steps that are begun.

        Raises what the thread met: a request that every server would refuse, a reward that fails.
        """
        event = self._thread.until(self._readiness.next_step)
        if report is None:
            return self._thread.call(event)
        begin = self._num_tokens
        return self._thread.call(event, lambda: report(self._thread.call(self._progress(begin))))

    def drained(self, version: int) -> Mapping[str, str] | FleetEvent:
        """Waits until every server may get weights of ``version``, or where they are staged, until
        none needs any that are older than the last; returns all that are to get them. A
        ``FleetEvent`` where none is left that could sample what is wanted of the old weights."""
        return self._thread.call(self._thread.until(partial(self._readiness.drained, version)))

    def settled(self) -> Literal[True] | FleetEvent:
        """Waits until, in lockstep, the newest weights are all that is wanted."""
        return self._thread.call(self._thread.until(self._readiness.settled))

    def is_settled(self) -> bool:
        """Whether ``settled`` need not wait."""
        (settled,) = self._thread.call(self._thread.until(lambda: (self._readiness.is_settled,)))
        return settled

    def published(
        self,
        version: int,
        updated: Mapping[str, str],
        lost: Mapping[str, str],
        *,
        staged: bool = False,
    ) -> None:
        """The weights of ``version`` exist, ``updated`` have them (name -> URL), and ``lost`` could
        not take them (name -> why). ``staged``: they have them beside those in use."""
        self._thread.call(self._published(version, updated, lost, staged))

    def take(self) -> SampledStep:
        """The next step."""
        return self._thread.call(self._take())

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]] = ()
    ) -> list[list[float]]:
        """What the servers say of sequences, in turn. Raises NoServerError where none is left."""
        scores = self._auxiliary.score(sequences, images)
        return self._thread.call(self._thread.unless_failed(scores))

    def counts(self) -> dict[str, float]:
        """Of servers and requests, as metrics."""
        names = ("source/servers", "source/lost_servers", "source/reissued_requests")
        return dict(zip(names, (len(self._clients), len(self._dead), self._num_reissued)))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the dispatcher's, the tokens that are there, the prompts."""
        return self._thread.call(self._state())

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[Completion, Score]] | FleetEvent:
        """All responses to some prompts that are not of the stream, one prompt after the other. A
        ``FleetEvent`` where no server is left."""
        return self._thread.call(self._generate(prompts, sampling))

    def close(self) -> None:
        """Ends all requests and the thread."""
        self._thread.call(self._end())
        self._thread.stop()
        self._rewards.close()
        self._switches.close()

    # See GenerationBackend

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        work = self._thread.spawn(self._request(worker, wanted))
        self._running[worker, wanted.request] = work

    def abort(self, worker: str, request: Request) -> None:
        work = self._running.pop((worker, request), None)
        if work is not None:
            work.cancel()

    def pause(self, level: int) -> None:
        """See GenerationBackend. Requests look at it with the next tokens that come."""
        self._level = level

    def events(self) -> list[Event]:
        """See GenerationBackend. Raises what the reward has raised."""
        events = self._events
        self._events = []
        for one, score in self._rewards.take():
            if one.request.version == AUXILIARY:
                self._auxiliary.note_score(one.request.group, score)
            # Its group may have been dropped meanwhile, and admitted again.
            elif self._job.store.get((one.request.group, one.request.response)) is one.completion:
                events.append(Scored(one.request, score))
        return events

    def holder(self, worker: str | None, group: int) -> int:
        """See GenerationBackend."""
        return 0

    # In the thread

    async def _start(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self._dispatcher.restore(saved)
        self._turn()
        self._thread.spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        for name, why in self._parts.timeouts.overdue().items():
            if name in self._clients:
                self._mark_dead(name, why, is_at_work=True)
        present = self._registry.look()
        for name in [name for name in self._clients if name not in present]:
            self._mark_dead(name, "it has left, or gave no sign of life for its lease")
        self._readiness.note_present({name: one.url for name, one in present.items()})
        if self._running or not self._clients:  # it waits for others, who are alive, or may come
            ACTIVITY.note("waiting for servers")
        self._thread.changed()

    def _turn(self) -> None:
        self._dispatcher.turn()
        for name in self._switches.begin():
            self._thread.spawn(self._switch(name))
        self._thread.changed()

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[Completion, Score]] | FleetEvent:
        asked = self._auxiliary.generate(prompts, sampling, self._job.demonstration)
        answers = await self._thread.unless_failed(asked)
        if answers is None:
            return await self._thread.until(self._readiness.for_newest)
        scores = self._auxiliary.scores(prompts, answers)
        self._turn()
        return list(zip(answers, await self._thread.unless_failed(scores), strict=True))

    async def _published(
        self, version: int, updated: Mapping[str, str], lost: Mapping[str, str], staged: bool
    ) -> None:
        for name, why in lost.items():
            self._mark_dead(name, why)
        if version > self._scheduler.version:
            self._scheduler.published(version)
        for name, url in updated.items():
            if name in self._dead:
                continue  # while the weights came
            if staged:
                self._switches.staged(name, url, version)
                self._readiness.note_arrival(name)
            elif name in self._clients:
                self._scheduler.switch(name, version)
            else:
                self._join(name, url, version)
        self._turn()

    def _join(self, name: str, url: str, version: int) -> None:
        self._clients[name] = self._parts.connect(url)
        self._urls[name] = url
        self._scheduler.join(name, self._parts.capacity, version)
        self._readiness.note_arrival(name)
        logger.info("server %s joined at weights version %d", name, version)

    async def _switch(self, name: str) -> None:
        """A server goes over to the weights that it has staged."""
        try:
            now = await self._switches.carry_out(name)
        except ConnectionError as error:
            self._mark_dead(name, f"failed to switch to staged weights: {error}")
            return
        if now is None:
            return
        if name in self._clients:
            self._scheduler.switch(name, now.version)
        else:
            self._join(name, now.url, now.version)
        self._turn()

    def _recall(self, name: str) -> None:
        """A server is to get other weights: what it was asked waits again."""
        for worker, request in self._scheduler.recall(name):
            self.abort(worker, request)

    def _note_failure(self, name: str, asked: Asked, error: Exception) -> None:
        """A server is marked dead, unless the request may be the reason that it failed."""
        if isinstance(error, self._parts.failed):
            if self._failures.failed(name, asked, str(error)) and name in self._clients:
                self._mark_dead(name, str(error))
            return
        is_at_work = not isinstance(error, self._parts.unreachable)
        if name in self._clients:
            self._mark_dead(name, str(error), is_at_work=is_at_work)
        if is_at_work:
            self._failures.broke_off(name, [asked], str(error))

    def _mark_dead(self, name: str, why: str, *, is_at_work: bool = False) -> None:
        """Forgets a server; others do what it had to do. ``is_at_work``: perhaps this ended it."""
        if name in self._dead:
            return
        self._dead.add(name)
        self._registry.remove(name)
        self._readiness.newcomers.pop(name, None)
        self._switches.forget(name)
        client = self._clients.pop(name, None)
        self._urls.pop(name, None)
        if client is None:
            logger.warning("server %s cannot join: %s", name, why)
            return
        unanswered = [request for worker, request in self._running if worker == name]
        self._scheduler.leave(name)
        broken_off = self._auxiliary.lost(name)
        for request in unanswered:
            broken_off.append(self._asked(request))
            self.abort(name, request)
        self._num_reissued += len(unanswered)
        self._thread.spawn(client.close())
        logger.warning(
            "server %s marked dead: %s; %d requests go to the %d others",
            name,
            why,
            len(unanswered),
            len(self._clients),
        )
        if is_at_work:
            self._failures.broke_off(name, broken_off, why)
        self._turn()

    def _asked(self, request: Request) -> Asked:
        visit = self._job.visit(request.group)
        return self._job.prompt(request.group, visit).uid, request.response

    async def _request(self, worker: str, wanted: GenerationRequest) -> None:
        request = wanted.request
        client = self._clients[worker]
        prompt = self._job.prompt(request.group, wanted.visit)
        asked = prompt.uid, request.response
        sampling = self._job.sampling(wanted.step, prompt, request.version)
        there = self._job.store.so_far(request)
        asked_of = (prompt, sampling, request.response)
        continuing = (() if there is None else there.token_ids, partial(self._is_enough, wanted))
        try:
            with self._parts.timeouts.waiting(worker, sampling.max_response_tokens) as answered:
                if self._job.is_partial:
                    new, is_paused = await client.generate_until(*asked_of, *continuing)
                    new = stamped(new, request.version) if is_paused else new
                else:
                    new, is_paused = await client.generate(*asked_of), False
                answered(len(new.token_ids))
        except self._parts.lost as error:
            self._running.pop((worker, request), None)
            self._num_reissued += 1
            self._events.append(Failed(worker, request))
            self._note_failure(worker, asked, error)
            self._turn()
            return
        self._failures.answered(worker, asked)
        self._num_tokens += len(new.token_ids)
        self._running.pop((worker, request), None)
        check_versions(request, new, exact=self._scheduler.rules.lockstep)
        whole = self._job.store.add(request, new)
        if is_paused:
            self._events.append(Paused(worker, request))
        else:
            facts = (len(whole.token_ids), whole.truncated, whole.spans)
            self._events.append(Ended(worker, request, *facts))
            self._rewards.give(request, prompt, whole)
        self._turn()

    def _is_enough(self, wanted: GenerationRequest, num_tokens: int) -> bool:
        """Whether a response has come to the level of its step."""
        return self._level is not None and wanted.begin + num_tokens >= self._level

    async def _take(self) -> SampledStep:
        summary = self._dispatcher.take()
        sampled = SampledStep.of(summary, self._job, rank=0)
        groups = summary.groups
        store = self._job.store
        store.begin_step(store.unfinished(groups, summary.ended))
        store.forget([*groups.groups, *groups.refused])
        self._level = None
        self._job.stream.forget(groups.step, groups.end)
        self._turn()
        return sampled

    async def _state(self) -> dict[str, Any]:
        return {
            **self._dispatcher.state(),
            "store": self._job.store.state(),
            "prompts": self._job.stream.state(),
        }

    async def _progress(self, begin: int) -> Progress:
        # Only a server knows the tokens of what it has not finished.
        return replace(self._dispatcher.progress, num_tokens=self._num_tokens - begin)

    async def _end(self) -> None:
        self._thread.cancel_all()
        self._rewards.forget()
        for client in self._clients.values():
            await client.close()
