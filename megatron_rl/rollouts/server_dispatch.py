"""Rank 0's thread that keeps servers busy while the policy trains.

The scheduler says what is to be done (``scheduling/scheduler.py``); this does it: sends requests,
has finished groups judged, gives up servers that fail. All of its state belongs to the thread; the
methods of ``ServerDispatcher`` hand work over to it and wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from megatron_rl.rollouts.prompt_stream import FinishedGroup, OpenGroup
from megatron_rl.rollouts.server_conditions import Conditions
from megatron_rl.rollouts.server_failures import Asked, Failures
from megatron_rl.rollouts.server_questions import Questions
from megatron_rl.rollouts.server_switches import Switches
from megatron_rl.rollouts.server_tasks import Client, News, Servers, Tasks, check_versions
from megatron_rl.rollouts.server_thread import LoopThread
from megatron_rl.rollouts.server_verdicts import Verdicts
from megatron_rl.runtime.display import Progress
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.scheduling.batches import Batch, Rules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Assignment, Request
from megatron_rl.types import Completion, Image, Prompt, Sampling

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
        self._failures = Failures()
        self._switches = Switches(tasks.switch, self._scheduler)
        self._conditions = Conditions(self._scheduler, self._switches, self._urls, self._recall)
        self._questions = Questions(
            tasks, self._clients, self._able, self._failures, self._note_failure
        )
        self._running: dict[Assignment, asyncio.Task] = {}
        in_step = rules.groups_per_step * rules.responses_per_group
        self._verdicts = Verdicts(tasks.judge, at_most=in_step)
        self._num_reissued = 0
        self._given_up: set[str] = set()  # no other start of a server has its name
        self._num_tokens = 0  # of all answers
        self._thread = LoopThread("dispatcher")
        self._thread.call(self._start())

    # From the main thread

    def wait(self, report: Callable[[Progress], None] | None = None) -> Literal[True] | News:
        """Until the next step has its groups, a server wants to join, or nobody is left to work:
        the last is said once, until somebody has come. ``report`` is told how far it is, of all
        steps that are begun, with the tokens of the responses that have come since it waits.

        Raises what the dispatcher met: a request that every server would refuse, a reward that
        fails.
        """
        if report is None:
            return self._thread.call(self._news())
        told = report
        begin = self._num_tokens

        def tell() -> None:
            told(self._thread.call(self._progress(begin)))

        return self._thread.call(self._news(), tell)

    def drained(self, version: int) -> Mapping[str, str] | News:
        """Waits until every server may get weights of ``version``; returns all that are to get
        them, also those that have come since. News where nobody is left who could sample what is
        still wanted of the old weights. Where weights are staged, so that a server may still be
        busy with the last ones but one, it waits until none needs any that are older."""
        return self._thread.call(self._thread.until(partial(self._conditions.drained, version)))

    def settled(self) -> Literal[True] | News:
        """Waits until, in lockstep, the newest weights are all that is wanted: a run that goes on
        from a checkpoint has no others."""
        return self._thread.call(self._thread.until(self._conditions.settled))

    def is_settled(self) -> bool:
        """Whether ``settled`` need not wait."""
        return self._thread.call(self._is_settled())

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

    def take(self) -> tuple[Batch, list[FinishedGroup]]:
        """The groups of the next step, in prompt order."""
        return self._thread.call(self._take())

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[Image]] = ()
    ) -> list[list[float]]:
        """What one server says of sequences, the next time the next one. Raises NoServerError where
        none is left."""
        scores = self._questions.score(sequences, images)
        return self._thread.call(self._thread.unless_failed(scores))

    def counts(self) -> dict[str, float]:
        """Servers at work, those lost so far, and requests that were sent again."""
        names = ("source/servers", "source/lost_servers", "source/reissued_requests")
        return dict(zip(names, (len(self._clients), len(self._given_up), self._num_reissued)))

    def state(self) -> dict[str, Any]:
        """Plain values: the scheduler's, and the answers that are there."""
        return self._thread.call(self._state())

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[FinishedGroup] | News:
        """All responses to some prompts that are not of the stream, as those of a held-out set,
        beside what the servers do for training. News where no server is left."""
        return self._thread.call(self._generate(prompts, sampling))

    def close(self) -> None:
        """Ends all requests and the thread."""
        self._thread.call(self._end())
        self._thread.stop()
        self._verdicts.close()
        self._switches.close()

    # In its own thread

    async def _start(self) -> None:
        for version, group in self._scheduler.to_judge():
            self._thread.spawn(self._judge(version, group, self._open[group]))
        self._thread.spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        for name, why in self._tasks.patience.overdue().items():
            if name in self._clients:
                self._give_up(name, why, is_at_work=True)
        present = self._servers.look()
        for name in [name for name in self._clients if name not in present]:
            self._give_up(name, "it has left, or gave no sign of life for its lease")
        self._conditions.note_present({name: one.url for name, one in present.items()})
        if self._running or not self._clients:  # it waits for others, who are alive, or may come
            ACTIVITY.note("waiting for servers")
        self._thread.changed()

    async def _news(self) -> Literal[True] | News:
        return await self._thread.until(self._conditions.next_step)

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[FinishedGroup] | News:
        answers = await self._thread.unless_failed(self._questions.generate(prompts, sampling))
        if answers is None:
            return await self._thread.until(self._conditions.for_newest)
        return await self._judged(prompts, answers)

    async def _judged(
        self, prompts: Sequence[Prompt], answers: Sequence[Completion]
    ) -> list[FinishedGroup]:
        size = len(answers) // len(prompts)
        by_prompt = [answers[begin : begin + size] for begin in range(0, len(answers), size)]
        scores = await asyncio.gather(*map(self._verdicts.on, prompts, by_prompt))
        return list(map(FinishedGroup, prompts, by_prompt, scores))

    async def _is_settled(self) -> bool:
        return self._conditions.is_settled

    async def _published(
        self, version: int, updated: Mapping[str, str], lost: Mapping[str, str], staged: bool
    ) -> None:
        for name, why in lost.items():
            self._give_up(name, why)
        if version > self._scheduler.version:
            self._scheduler.published(version)
        for name, url in updated.items():
            if name in self._given_up:
                continue  # while the weights came
            if staged:
                self._switches.staged(name, url, version)
                self._conditions.note_arrival(name)
            elif name in self._clients:
                self._scheduler.switch(name, version)
            else:
                self._welcome(name, url, version)
        self._pump()

    def _welcome(self, name: str, url: str, version: int) -> None:
        self._clients[name] = self._tasks.connect(url)
        self._urls[name] = url
        self._scheduler.join(name, self._tasks.capacity, version)
        self._conditions.note_arrival(name)
        logger.info("server %s takes part from weights version %d on", name, version)

    async def _switch(self, name: str) -> None:
        """A server goes over to the weights that it has staged."""
        try:
            now = await self._switches.carry_out(name)
        except ConnectionError as error:
            self._give_up(name, f"it does not go over to newer weights: {error}")
            return
        if now is None:
            return
        if name in self._clients:
            self._scheduler.switch(name, now.version)
        else:
            self._welcome(name, now.url, now.version)
        self._pump()
        self._thread.changed()

    async def _able(self) -> list[str]:
        """The servers with the newest weights, as soon as there is one; none where none is left."""
        return await self._thread.until(self._conditions.newest)

    def _recall(self, name: str) -> None:
        """A server is to get other weights: what it was asked waits again."""
        for assignment in self._scheduler.recall(name):
            self._running.pop(assignment).cancel()

    def _note_failure(self, name: str, asked: Asked, error: Exception) -> None:
        """A server has not answered a request: it is given up, unless this may be the request's."""
        tasks = self._tasks
        if isinstance(error, tasks.failed):
            if self._failures.failed(name, asked, str(error)) and name in self._clients:
                self._give_up(name, str(error))
            return
        is_at_work = not isinstance(error, tasks.unreachable)
        if name in self._clients:
            self._give_up(name, str(error), is_at_work=is_at_work)
        if is_at_work:
            self._failures.broke_off(name, [asked], str(error))

    def _give_up(self, name: str, why: str, *, is_at_work: bool = False) -> None:
        """Forgets a server; others do what it had to do. ``is_at_work``: perhaps this ended it."""
        if name in self._given_up:
            return
        self._given_up.add(name)
        self._servers.remove(name)
        self._conditions.newcomers.pop(name, None)
        self._switches.forget(name)
        client = self._clients.pop(name, None)
        self._urls.pop(name, None)
        if client is None:
            logger.warning("server %s cannot take part: %s", name, why)
            return
        unanswered = [assignment for assignment in self._running if assignment.worker == name]
        self._scheduler.leave(name)
        broken_off = self._questions.lost(name)
        for assignment in unanswered:
            broken_off.append(self._asked(assignment.request))
            self._running.pop(assignment).cancel()
        self._num_reissued += len(unanswered)
        self._thread.spawn(client.close())
        logger.warning(
            "server %s is given up: %s; %d requests go to the %d others",
            name,
            why,
            len(unanswered),
            len(self._clients),
        )
        if is_at_work:
            self._failures.broke_off(name, broken_off, why)
        self._pump()
        self._thread.changed()

    def _asked(self, request: Request) -> Asked:
        return self._prompt_of(request.group).uid, request.response

    def _pump(self) -> None:
        """Does what the scheduler says."""
        for assignment in self._scheduler.to_abort():
            task = self._running.pop(assignment, None)
            if task is not None:
                task.cancel()
        for assignment in self._scheduler.assign():
            self._running[assignment] = self._thread.spawn(self._request(assignment))
        for name in self._switches.begin():
            self._thread.spawn(self._switch(name))

    async def _request(self, assignment: Assignment) -> None:
        worker, request = assignment
        client = self._clients[worker]
        prompt = self._prompt_of(request.group)
        step = self._batch_with(request.group).step
        sampling = self._tasks.sampling(step, prompt, request.version)
        try:
            with self._tasks.patience.waiting(worker, sampling.max_response_tokens) as answered:
                completion = await client.generate(prompt, sampling, request.response)
                answered(len(completion.token_ids))
        except self._tasks.lost as error:
            self._running.pop(assignment, None)
            self._num_reissued += 1
            self._scheduler.failed(worker, request)
            self._note_failure(worker, self._asked(request), error)
            self._pump()
            return
        self._failures.answered(worker, self._asked(request))
        self._num_tokens += len(completion.token_ids)
        self._running.pop(assignment, None)
        if not self._scheduler.finished(worker, request):
            return
        check_versions(request, completion, exact=self._scheduler.rules.lockstep)
        group = self._open.setdefault(request.group, OpenGroup(prompt, step))
        group.completions[request.response] = completion
        if self._scheduler.is_whole(request.group):
            self._thread.spawn(self._judge(request.version, request.group, group))
        self._pump()

    def _batch_with(self, group: int) -> Batch:
        batch = self._scheduler.batch_with(group)
        assert batch is not None, f"group {group} is of no step to come"
        return batch

    def _prompt_of(self, group: int) -> Prompt:
        return self._tasks.prompts.of_step(self._batch_with(group).start, group)

    async def _judge(self, version: int, number: int, group: OpenGroup) -> None:
        scores = await self._verdicts.on(group.prompt, group.in_order())
        if self._open.get(number) is not group:
            return  # it was dropped meanwhile, and perhaps admitted again
        group.scores = scores
        self._scheduler.judged(version, number, wanted=self._tasks.wants(scores))
        self._forget_closed()
        self._pump()
        self._thread.changed()

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

    async def _progress(self, begin: int) -> Progress:
        """``begin``: of the tokens that are not counted."""
        scheduler = self._scheduler
        num_left = scheduler.queue.num_waiting + scheduler.queue.num_running
        return Progress(
            num_done=scheduler.num_answered,
            num_wanted=scheduler.num_answered + num_left,
            num_tokens=self._num_tokens - begin,
            longest=0,  # only a server knows the tokens of what it has not finished
            age=max(0, scheduler.version - scheduler.oldest_needed),
        )

    async def _end(self) -> None:
        self._thread.cancel_all()
        self._verdicts.forget()
        for client in self._clients.values():
            await client.close()
