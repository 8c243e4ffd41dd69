"""Rank 0's thread that keeps servers busy while the policy trains.

Dispatchers say what is to be sampled; this sends it to servers, has their answers scored, and marks
servers dead that fail. All of its state belongs to the thread; the methods of ``ServerBackend`` for
the main thread hand work over to it and wait.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, wraps
from itertools import starmap, zip_longest
from typing import Any, Literal, TypeVar

from megatron_rl.engine.serving.client import (
    RequestFailedError,
    ServerLostError,
    ServerUnreachableError,
)
from megatron_rl.rollouts.backends.failures import Asked, RequestFailures
from megatron_rl.rollouts.backends.loop_thread import LoopThread
from megatron_rl.rollouts.backends.readiness import (
    FleetEvent,
    FleetReadiness,
    NoServerError,
    Server,
)
from megatron_rl.rollouts.backends.requests import (
    AskedTurns,
    ServerFleet,
    ServerParts,
    ServerRequests,
)
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.rollouts import SampledStep, open_metrics
from megatron_rl.runtime.display import Progress
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.registry import Registry
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.types import Image

LOOK_EVERY_S = 0.5
_SWITCHES = 64  # servers that switch to staged weights at a time
_SCORED: Asked = ("of the logprob check", 0)
logger = logging.getLogger(__name__)


Result = TypeVar("Result")


def in_thread(work: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Result]:
    """A method that the thread runs while its caller, the main thread, waits."""
    return wraps(work)(lambda self, *args, **more: self._thread.call(work(self, *args, **more)))


class ServerBackend:
    """Runs jobs on vLLM servers: the steps of a run, and answers to other prompts in between. On
    rank 0 only."""

    def __init__(
        self,
        job: GenerationJob,
        parts: ServerParts,
        registry: Registry,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """``saved``: the ``state`` to resume from; its tokens are in the job's store already."""
        self._job = job
        self._parts = parts
        self._registry = registry
        self._thread = LoopThread("dispatcher")
        self._fleet = ServerFleet(
            parts,
            self._thread,
            parts.rewards(lambda: self._thread.soon(self._turn)),
            RequestFailures(),
            self._note_failure,
            self._turn,
            None if parts.turns is None else AskedTurns(parts.turns),
        )
        if parts.turns is not None:
            parts.turns.wake_by(lambda: self._thread.soon(self._turn))
        self._clients = self._fleet.clients
        if saved is None:
            self._scheduler = Scheduler(job.rules, version=-1)
        else:
            self._scheduler = Scheduler.restored(job.rules, saved["scheduler"])
        self._training = ServerRequests(job, self._scheduler, self._fleet)
        self._other: ServerRequests | None = None  # answers to other prompts, while they are made
        self._readiness = FleetReadiness(self._training.dispatcher, self._recall)
        self._switches = ThreadPoolExecutor(_SWITCHES, "switches")
        self._num_reissued = 0  # in answers to other prompts
        self._num_scored = 0
        self._dead: set[str] = set()  # names; a server that is started again has a new one
        self._thread.call(self._start(saved))

    # From the main thread

    def wait(self, report: Callable[[Progress], None] | None = None) -> Literal[True] | FleetEvent:
        """Waits until the next step has its groups, a server wants to join, or none is left, which
        is reported once. ``report`` is given the progress of all steps that have begun. Re-raises
        errors of the thread: a request that every server would refuse, a reward that fails."""
        event = self._thread.until(self._readiness.next_step)
        if report is None:
            return self._thread.call(event)
        begin = self._training.num_tokens

        async def progress() -> Progress:
            # Only a server knows the tokens of what it has not finished.
            num_tokens = self._training.num_tokens - begin
            return replace(self._training.dispatcher.progress, num_tokens=num_tokens)

        return self._thread.call(event, lambda: report(self._thread.call(progress())))

    def drained(self, version: int) -> Mapping[str, str] | FleetEvent:
        """Waits until every server may get weights of ``version`` (where weights are staged: until
        those staged before are in use everywhere); returns the servers that are to get them. A
        ``FleetEvent`` where no server is left to sample what needs the old weights."""
        return self._thread.call(self._thread.until(partial(self._readiness.drained, version)))

    def settled(self) -> Literal[True] | FleetEvent:
        """In lockstep waits until nothing needs older weights than the newest."""
        return self._thread.call(self._thread.until(self._readiness.settled))

    @in_thread
    async def published(
        self,
        version: int,
        updated: Mapping[str, str],
        lost: Mapping[str, str],
        *,
        staged: bool = False,
    ) -> None:
        """The weights of ``version`` exist, ``updated`` have them (name -> URL), and ``lost`` could
        not take them (name -> why). ``staged``: they have them next to those in use."""
        for name, why in lost.items():
            self._mark_dead(name, why)
        # Before the servers switch: what wants the new weights must be in the queue.
        if version > self._scheduler.version:
            self._scheduler.published(version)
        for name, url in updated.items():
            if name in self._dead:
                continue  # it was lost while it got the weights
            server = self._readiness.note_arrival(name, url)
            if staged:
                server.staged = version
            else:
                self._has(name, server, version)
        self._turn()

    @in_thread
    async def take(self) -> SampledStep:
        summary = self._training.dispatcher.take()
        if self._parts.turns is not None:
            self._parts.turns.begin_step()
        # Before the tokens of the step leave the store.
        sampled = SampledStep.of(summary, self._job, rank=0)
        groups = summary.groups
        store = self._job.store
        store.begin_step(store.unfinished(groups, summary.ended))
        store.forget(groups.gone)
        self._training.step_is_taken()
        self._job.stream.forget(groups.step, groups.end)
        metrics = {**open_metrics(groups, self._job), **self.counts()}
        self._turn()
        return sampled._replace(summary=replace(summary, metrics=metrics))

    @in_thread
    async def generate(self, job: GenerationJob) -> SampledStep | FleetEvent:
        """Runs a job of one step on the servers with the newest weights. A ``FleetEvent`` where
        none of these is left: call it again once there is one."""
        # Its only step is the one that the newest weights sample for.
        version = self._scheduler.version
        scheduler = Scheduler(job.rules, step=version, version=version)
        requests = ServerRequests(job, scheduler, self._fleet)
        self._other = requests
        try:
            self._turn()
            event = await self._thread.until(partial(self._answered, requests))
            if isinstance(event, FleetEvent):
                return event
            return SampledStep.of(requests.dispatcher.take(), job, rank=0)
        finally:
            self._other = None
            self._num_reissued += requests.num_reissued
            requests.end()

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]] = ()
    ) -> list[list[float]]:
        """Logprobs of sequences by one server, in turn. Raises NoServerError where none is left."""
        return self._thread.call(self._thread.unless_failed(self._score(sequences, images)))

    def counts(self) -> dict[str, float]:
        """Metrics of servers and requests."""
        return {
            "source/servers": len(self._clients),
            "source/lost_servers": len(self._dead),
            "source/reissued_requests": self._num_reissued + self._training.num_reissued,
        }

    @in_thread
    async def state(self) -> dict[str, Any]:
        """For a checkpoint: state of the dispatcher, stored tokens, position in the prompts."""
        return {**self._training.dispatcher.state(), **self._job.state()}

    def close(self) -> None:
        self._thread.call(self._end())
        self._thread.stop()
        self._fleet.rewards.close()
        self._switches.shutdown(wait=False, cancel_futures=True)

    # In the thread

    async def _start(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self._training.dispatcher.restore(saved)
        self._turn()
        self._thread.spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            for name, why in self._parts.timeouts.overdue().items():
                if name in self._clients:
                    self._mark_dead(name, why, is_at_work=True)
            present = self._registry.look()
            for name in [name for name in self._clients if name not in present]:
                self._mark_dead(name, "it has left, or gave no sign of life for its lease")
            known = self._readiness.servers
            urls = {name: one.url for name, one in present.items() if name not in known}
            self._readiness.newcomers = urls
            # It waits for others, who are alive, or may come.
            if not self._clients or any(each.is_busy for each in self._jobs):
                ACTIVITY.note("waiting for servers")
            self._thread.changed()
            await asyncio.sleep(LOOK_EVERY_S)

    @property
    def _jobs(self) -> list[ServerRequests]:
        return [self._training] if self._other is None else [self._training, self._other]

    def _turn(self) -> None:
        if self._thread.has_failed or self._fleet.failures.fatal:
            return  # the run ends: a prompt that has ended three servers goes to no other
        if self._fleet.asked_turns is not None:
            self._fleet.asked_turns.take()
        for one, score in self._fleet.rewards.take():
            for each in self._jobs:
                each.note_score(one, score)
        if self._other is not None:
            # Also those that switched to the newest weights after the job had begun.
            workers = self._other.scheduler.queue.workers
            for name in self._readiness.newest() or ():
                if name not in workers:
                    self._other.join(name, self._other.scheduler.version)
        for each in self._jobs:
            each.dispatcher.turn()
        if self._fleet.rewards.is_due:  # of demonstrations, for which no server calls this again
            self._thread.soon(self._turn)
        for name, server in self._readiness.begin_switches().items():
            self._thread.spawn(self._switch(name, server))
        self._thread.changed()

    def _answered(self, requests: ServerRequests) -> Literal[True] | FleetEvent | None:
        if requests.dispatcher.is_ready:
            return True
        # None: a server will switch to the newest weights by itself.
        return self._readiness.for_newest() if self._readiness.newest() == [] else None

    async def _score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]]
    ) -> list[list[float]]:
        while names := await self._thread.until(self._readiness.newest):
            self._num_scored += 1
            name = names[self._num_scored % len(names)]
            pairs = zip_longest(sequences, images, fillvalue=())
            try:
                # It may wait for a response of training to end, so it may take as long as one. A
                # server that is marked dead has its client closed, which ends this.
                with self._parts.timeouts.waiting(name, self._parts.longest_response):
                    scores = await asyncio.gather(*starmap(self._clients[name].score, pairs))
            except ServerLostError as error:
                self._note_failure(name, _SCORED, error)
            else:
                self._fleet.failures.answered(name, _SCORED)
                return scores
        raise NoServerError("no server is left to score sequences")

    def _has(self, name: str, server: Server, version: int) -> None:
        """Notes that a server, which may be new, samples with these weights from now on."""
        if name in self._clients:
            self._scheduler.switch(name, version)
            return
        self._clients[name] = self._parts.connect(server.url)
        self._training.join(name, version)
        logger.info("server %s joined at weights version %d", name, version)

    async def _switch(self, name: str, server: Server) -> None:
        """Has a server switch to its staged weights; it may be marked dead at any moment, also
        before this has begun."""
        version = server.staged
        failure = None
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._switches, self._parts.switch, server.url, version)
        except ConnectionError as error:
            failure = f"failed to switch to staged weights: {error}"
        server.is_switching = False
        if self._readiness.servers.get(name) is not server:
            return  # it was marked dead meanwhile
        if failure is not None:
            self._mark_dead(name, failure)
        else:
            self._has(name, server, version)
            self._turn()

    def _recall(self, name: str) -> None:
        """Takes back the requests of a server that is to get other weights: they wait again."""
        for worker, request in self._scheduler.queue.recall(name):
            self._training.abort(worker, request)

    def _note_failure(self, name: str, asked: Asked, error: ServerLostError) -> None:
        """Marks a server dead, unless the request may be the reason that it failed."""
        failures = self._fleet.failures
        if isinstance(error, RequestFailedError):
            if failures.failed(name, asked, str(error)) and name in self._clients:
                self._mark_dead(name, str(error))
            return
        is_at_work = not isinstance(error, ServerUnreachableError)
        if is_at_work:  # before the turn in which another server gets the request
            failures.broke_off(name, [asked], str(error))
        if name in self._clients:
            self._mark_dead(name, str(error), is_at_work=is_at_work)

    def _mark_dead(self, name: str, why: str, *, is_at_work: bool = False) -> None:
        """Gives a server's requests to others. ``is_at_work``: one of them may have ended it."""
        if name in self._dead:
            return
        self._dead.add(name)
        self._registry.remove(name)
        self._readiness.forget(name)
        client = self._clients.pop(name, None)
        if client is None:
            logger.warning("server %s cannot join: %s", name, why)
            return
        broken_off = [asked for each in self._jobs for asked in each.lost(name)]
        self._thread.spawn(client.close())
        message = "server %s marked dead: %s; %d requests go to the %d others"
        logger.warning(message, name, why, len(broken_off), len(self._clients))
        if is_at_work:
            self._fleet.failures.broke_off(name, broken_off, why)
        self._turn()

    async def _end(self) -> None:
        self._thread.cancel_all()
        self._fleet.rewards.forget()
        for client in self._clients.values():
            await client.close()
