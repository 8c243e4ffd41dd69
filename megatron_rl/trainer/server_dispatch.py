"""Rank 0's thread that keeps servers busy while the policy trains.

The scheduler says what is to be done (``scheduling/scheduler.py``); this does it: sends requests,
has finished groups judged, gives up servers that fail. All of its state belongs to the thread; the
methods of ``ServerDispatcher`` hand work over to it and wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

from megatron_rl.runtime.activity import ACTIVITY
from megatron_rl.scheduling.batches import Batch, Rules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Assignment, Request
from megatron_rl.trainer.prompt_stream import FinishedGroup, OpenGroup
from megatron_rl.trainer.server_questions import Questions
from megatron_rl.trainer.server_tasks import (
    Client,
    News,
    Servers,
    Tasks,
    WeightVersionError,
)
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score

Result = TypeVar("Result")
LOOK_EVERY_S = 0.5
logger = logging.getLogger(__name__)


class ServerDispatcher:
    """See the head of this file. For rank 0; its methods are called from the main thread."""

    def __init__(
        self,
        rules: Rules,
        tasks: Tasks,
        servers: Servers,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """``saved``: the ``state`` to go on from; None: from the start."""
        self._tasks = tasks
        self._scheduler = Scheduler(rules, version=-1)
        self._open: dict[int, OpenGroup] = {}
        if saved is not None:
            self._scheduler = Scheduler.restored(rules, saved["scheduler"])
            for number, group in saved["groups"].items():
                step = self._batch_with(number).step
                self._open[number] = OpenGroup.restored(self._prompt_of(number), step, group)
        self._servers = servers
        self._clients: dict[str, Client] = {}
        self._urls: dict[str, str] = {}
        self._questions = Questions(tasks, self._clients, self._give_up)
        self._running: dict[Assignment, asyncio.Task] = {}
        self._alive: set[asyncio.Task] = set()
        self._newcomers: dict[str, str] = {}
        self._failure: BaseException | None = None
        self._judges = ThreadPoolExecutor(1, "verdicts")
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._is_told_of_starving = False
        self._num_reissued = 0
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._thread.start()
        self._call(self._start())

    # From the main thread

    def wait(self) -> Literal[True] | News:
        """Until the next step has its groups, a server wants to join, or nobody is left to work:
        the last is said once, until somebody has come.

        Raises what the dispatcher met: a request that every server would refuse, a reward that
        fails.
        """
        return self._call(self._news())

    def drained(self, version: int) -> Mapping[str, str] | News:
        """Waits until every server may get weights of ``version``; returns all that are to get
        them, also those that have come since. News where nobody is left who could sample what is
        still wanted of the old weights."""
        return self._call(self._drained(version))

    def published(self, version: int, updated: Mapping[str, str], lost: Mapping[str, str]) -> None:
        """The weights of ``version`` exist, ``updated`` have them (name -> URL), and ``lost`` could
        not take them (name -> why)."""
        self._call(self._published(version, updated, lost))

    def take(self) -> tuple[Batch, list[FinishedGroup]]:
        """The groups of the next step, in prompt order."""
        return self._call(self._take())

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]] = ()
    ) -> list[list[float]]:
        """What one server says of sequences, the next time the next one. Raises NoServerError where
        none is left."""
        return self._call(self._questions.score(sequences, images))

    def counts(self) -> dict[str, float]:
        """Servers at work, those lost so far, and requests that were sent again."""
        names = ("source/servers", "source/lost_servers", "source/reissued_requests")
        return dict(zip(names, (len(self._clients), self._num_lost, self._num_reissued)))

    def state(self) -> dict[str, Any]:
        """Plain values: the scheduler's, and the answers that are there."""
        return self._call(self._state())

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[FinishedGroup] | News:
        """All responses to some prompts that are not of the stream, as those of a held-out set,
        beside what the servers do for training. News where no server is left."""
        return self._call(self._generate(prompts, sampling))

    def close(self) -> None:
        """Ends all requests and the thread."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._judges.shutdown()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # In its own thread

    async def _start(self) -> None:
        for version, group in self._scheduler.to_judge():
            self._spawn(self._judge(version, group, self._open[group]))
        self._spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        for name, why in self._tasks.patience.overdue().items():
            if name in self._clients:
                self._give_up(name, why)
        present = self._servers.look()
        for name in [name for name in self._clients if name not in present]:
            self._give_up(name, "it has left, or gave no sign of life for its lease")
        self._newcomers = {
            name: server.url for name, server in present.items() if name not in self._clients
        }
        if self._running or not self._clients:  # it waits for others, who are alive, or may come
            ACTIVITY.note("waiting for servers")
        self._changed.set()

    async def _until(self, answer: Callable[[], Result | None]) -> Result:
        """Waits until there is an answer; raises what has failed meanwhile."""
        while True:
            if self._failure is not None:
                raise self._failure
            found = answer()
            if found is not None:
                return found
            self._changed.clear()
            await self._changed.wait()

    async def _news(self) -> Literal[True] | News:
        return await self._until(self._news_now)

    def _news_now(self) -> Literal[True] | News | None:
        has_work = self._scheduler.queue.num_waiting > 0
        if self._scheduler.is_ready and (self._clients or not has_work):
            return True
        return self._arrivals()

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[FinishedGroup] | News:
        answers = await self._questions.generate(prompts, sampling)
        if answers is None:
            return await self._until(self._arrivals)
        return await self._judged(prompts, answers)

    async def _judged(
        self, prompts: Sequence[Prompt], answers: Sequence[Completion]
    ) -> list[FinishedGroup]:
        size = len(answers) // len(prompts)
        groups = []
        for place, prompt in enumerate(prompts):
            completions = answers[place * size : (place + 1) * size]
            groups.append(
                FinishedGroup(prompt, completions, await self._scores(prompt, completions))
            )
        return groups

    def _arrivals(self) -> News | None:
        if self._newcomers:
            return News("join", dict(self._newcomers))
        if not self._clients and not self._is_told_of_starving:
            self._is_told_of_starving = True
            return News("starved")
        return None

    async def _drained(self, version: int) -> Mapping[str, str] | News:
        return await self._until(partial(self._drained_now, version))

    def _drained_now(self, version: int) -> Mapping[str, str] | News | None:
        scheduler = self._scheduler
        is_newer = version > scheduler.version  # not where a run goes on from a checkpoint
        if is_newer and self._clients and not all(map(scheduler.may_switch, self._clients)):
            return None
        if is_newer and not self._clients and scheduler.wants_newest:
            # The last verdicts of a filtered batch may ask for more, of weights that must be there.
            return self._arrivals() if scheduler.queue.num_waiting > 0 else None
        return {**{name: self._urls[name] for name in self._clients}, **self._newcomers}

    async def _published(
        self, version: int, updated: Mapping[str, str], lost: Mapping[str, str]
    ) -> None:
        for name, why in lost.items():
            self._give_up(name, why)
        if version > self._scheduler.version:
            self._scheduler.published(version)
        for name, url in updated.items():
            if name in self._clients:
                self._scheduler.switch(name, version)
            else:
                self._welcome(name, url, version)
        self._pump()

    def _welcome(self, name: str, url: str, version: int) -> None:
        self._clients[name] = self._tasks.connect(url)
        self._urls[name] = url
        self._newcomers.pop(name, None)
        self._scheduler.join(name, self._tasks.capacity, version)
        self._is_told_of_starving = False
        logger.info("server %s takes part from weights version %d on", name, version)

    def _give_up(self, name: str, why: str) -> None:
        """Forgets a server; others do what it had to do."""
        self._servers.remove(name)
        self._newcomers.pop(name, None)
        self._num_lost += 1
        client = self._clients.pop(name, None)
        if client is None:
            logger.warning("server %s cannot take part: %s", name, why)
            return
        unanswered = [assignment for assignment in self._running if assignment.worker == name]
        self._scheduler.leave(name)
        for assignment in unanswered:
            self._running.pop(assignment).cancel()
        self._questions.lost(name)
        self._num_reissued += len(unanswered)
        self._spawn(client.close())
        logger.warning(
            "server %s is given up: %s; %d requests go to the %d others",
            name,
            why,
            len(unanswered),
            len(self._clients),
        )
        self._pump()
        self._changed.set()

    def _pump(self) -> None:
        """Does what the scheduler says."""
        for assignment in self._scheduler.to_abort():
            task = self._running.pop(assignment, None)
            if task is not None:
                task.cancel()
        for assignment in self._scheduler.assign():
            self._running[assignment] = self._spawn(self._request(assignment))

    async def _request(self, assignment: Assignment) -> None:
        worker, request = assignment
        client = self._clients[worker]
        prompt = self._prompt_of(request.group)
        step = self._batch_with(request.group).step
        sampling = self._tasks.sampling(step)
        try:
            with self._tasks.patience.waiting(worker, sampling.max_response_tokens) as answered:
                completion = await client.generate(prompt, sampling, request.response)
                answered(len(completion.token_ids))
        except self._tasks.lost as error:
            if worker in self._clients:
                self._give_up(worker, str(error))
            return
        self._running.pop(assignment, None)
        if not self._scheduler.finished(worker, request):
            return
        self._check_versions(request, completion)
        group = self._open.setdefault(request.group, OpenGroup(prompt, step))
        group.completions[request.response] = completion
        if self._scheduler.is_whole(request.group):
            self._spawn(self._judge(request.version, request.group, group))
        self._pump()

    def _batch_with(self, group: int) -> Batch:
        batch = self._scheduler.batch_with(group)
        assert batch is not None, f"group {group} is of no step to come"
        return batch

    def _prompt_of(self, group: int) -> Prompt:
        return self._tasks.prompts.of_step(self._batch_with(group).start, group)

    def _check_versions(self, request: Request, completion: Completion) -> None:
        versions = [span.version for span in completion.spans]
        exact = self._scheduler.rules.lockstep
        wrong = versions != [request.version] if exact else min(versions) < request.version
        if wrong:
            raise WeightVersionError(
                f"a response that was to be sampled with weights version {request.version}"
                f"{'' if exact else ' or newer'} comes from {versions}; another program may have"
                " sent weights to a server of this run"
            )

    async def _judge(self, version: int, number: int, group: OpenGroup) -> None:
        scores = await self._scores(group.prompt, group.in_order())
        if self._open.get(number) is not group:
            return  # it was dropped meanwhile, and perhaps admitted again
        group.scores = scores
        self._scheduler.judged(version, number, wanted=self._tasks.wants(scores))
        self._forget_closed()
        self._pump()
        self._changed.set()

    async def _scores(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Score]:
        judge = self._tasks.judge
        return await self._loop.run_in_executor(self._judges, judge, prompt, completions)

    async def _take(self) -> tuple[Batch, list[FinishedGroup]]:
        batch = self._scheduler.take()
        groups = [self._open[number].finished() for number in batch.groups]
        self._forget_closed()
        self._tasks.prompts.forget_below(self._scheduler.start)
        self._pump()
        return batch, groups

    def _forget_closed(self) -> None:
        """Also the answers of a group that was dropped and, in the same moment, admitted to the
        next step: seed and uid of its requests are others there."""
        for number, group in list(self._open.items()):
            batch = self._scheduler.batch_with(number)
            if batch is None or batch.step != group.step:
                del self._open[number]

    async def _state(self) -> dict[str, Any]:
        groups = {number: group.state() for number, group in self._open.items()}
        return {
            "scheduler": self._scheduler.state(),
            "groups": groups,
            "prompts": self._tasks.prompts.state(),
        }

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Runs ``work``; what it raises is raised in the main thread."""
        task = self._loop.create_task(work)
        self._alive.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task) -> None:
        self._alive.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._changed.set()

    async def _end(self) -> None:
        for task in list(self._alive):
            task.cancel()
        for client in self._clients.values():
            await client.close()
