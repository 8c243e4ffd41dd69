"""What rank 0 does of every generation: it holds the scheduler, hears of ended responses and of
rewards, and has a backend begin, stop and pause responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron_rl.rollouts.demonstrations import DEMONSTRATED
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.store import Place, restored_score, saved_score
from megatron_rl.runtime.display import Progress
from megatron_rl.scheduling.end_of_step import StepGroups
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Assignment, Request
from megatron_rl.types import Completion, Score, VersionSpan


class GenerationRequest(NamedTuple):
    """A response that a worker is to sample.

    Attributes:
        request: Which, and of what weights.
        step: That it is sampled for, counted from 1.
        visit: Tells the prompt from others like it in the step, see ``PromptStream.prompt``.
        begin: The part of the step's level that had passed when its group was begun.
    """

    request: Request
    step: int
    visit: int
    begin: int = 0


class Ended(NamedTuple):
    """A worker has a response; its tokens stay with the backend. ``length``: of the whole."""

    worker: str
    request: Request
    length: int
    truncated: bool
    spans: tuple[VersionSpan, ...]


class Paused(NamedTuple):
    """A response does not continue in this step; its tokens stay with the backend."""

    worker: str
    request: Request


class Failed(NamedTuple):
    """A worker could not answer a request."""

    worker: str
    request: Request


class Scored(NamedTuple):
    """The reward of a response that has ended."""

    request: Request
    score: Score


class WorkerProgress(NamedTuple):
    """Tokens that a worker has sampled, and the longest response still running."""

    worker: str
    num_tokens: int
    longest: int


Event = Ended | Paused | Failed | Scored | WorkerProgress


class GenerationBackend(Protocol):
    """What generates, as rank 0 sees it. It tells the scheduler of its workers, each of which takes
    so many requests at a time as it joins with (``capacity``)."""

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        """Begins a response, or continues it behind the tokens that it has from earlier steps."""

    def abort(self, worker: str, request: Request) -> None:
        """Ends a response without an answer."""

    def pause(self, level: int) -> None:
        """From now on ends every response that has got ``level`` tokens in this step (less what had
        passed of it when its group was begun), and keeps its tokens."""

    def events(self) -> Sequence[Event]:
        """What has happened since the last call."""

    def holder(self, worker: str | None, group: int) -> int:
        """The rank with the tokens of a response that ended on ``worker``; None: in an earlier
        step, or its prompt brought it along."""


class Answer(NamedTuple):
    """A response that has ended, without its tokens.

    Attributes:
        holder: The rank that has them.
        spans: Which weights sampled them.
        num_new: Tokens that were sampled in the present step.
        score: None while it is not known.
    """

    holder: int
    length: int
    truncated: bool
    spans: tuple[VersionSpan, ...]
    num_new: int
    score: Score | None = None


@dataclass(frozen=True)
class StepSummary:
    """The responses of a step without their tokens; equal on every rank.

    Attributes:
        groups: Which are trained. Where dynamic sampling left none, ``shown`` are the last that it
            refused, for the log.
        shown: The groups of ``answers``.
        visits: Of the prompts of these groups, see ``PromptStream.prompt``.
        answers: In canonical order.
        refused: Visit and scores of each group that dynamic sampling refused, where hooks see them.
        ended: Responses of groups that continue in the next step which have ended.
        discarded_tokens: Sampled for responses, or parts of them, that are not kept.
        metrics: Of the source.
    """

    groups: StepGroups
    shown: Sequence[int]
    visits: Mapping[int, int]
    answers: Sequence[Answer]
    refused: Mapping[int, tuple[int, Sequence[Score]]] = field(default_factory=dict)
    ended: frozenset[Place] = frozenset()
    discarded_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Dispatcher:
    """Decides nothing itself: which response is sampled where is said by the scheduler, which
    groups are trained by its end of a step, how by the job."""

    def __init__(
        self,
        job: GenerationJob,
        scheduler: Scheduler,
        backend: GenerationBackend,
        rewards: RewardThread,
    ) -> None:
        self.scheduler = scheduler
        self._job = job
        self._backend = backend
        self._rewards = rewards
        self._answers: dict[Place, Answer] = {}
        self._progress: dict[str, WorkerProgress] = {}
        self._level: int | None = None  # that the backend knows

    # While a step is generated

    def turn(self) -> bool:
        """Takes in what has happened and has done what follows; whether anything has happened."""
        events = self._backend.events()
        for event in events:
            self.on_event(event)
        self.dispatch()
        return bool(events)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._on_ended(event)
        elif isinstance(event, Scored):
            self._on_scored(event)
        elif isinstance(event, Paused):
            self.scheduler.paused(event.worker, event.request)
        elif isinstance(event, Failed):
            self.scheduler.failed(event.worker, event.request)
        else:
            self._progress[event.worker] = event

    def _on_ended(self, event: Ended) -> None:
        num_new = event.length - self._job.store.length(event.request)
        if self.scheduler.finished(event.worker, event.request, num_new):
            holder = self._backend.holder(event.worker, event.request.group)
            self._answers[_place(event.request)] = Answer(
                holder, event.length, event.truncated, event.spans, num_new
            )

    def _on_scored(self, event: Scored) -> None:
        """With the last score of a group it is known whether the method wants it."""
        answer = self._answers.get(_place(event.request))
        if answer is None:
            return  # its group was dropped meanwhile
        self._answers[_place(event.request)] = answer._replace(score=event.score)
        self._judge(event.request.version, event.request.group)

    def _judge(self, version: int, group: int) -> None:
        scores = self._scores(group)
        if scores is not None and self.scheduler.end.is_whole(group):
            self.scheduler.judged(version, group, wanted=self._job.wants(scores))

    def _scores(self, group: int) -> list[Score] | None:
        """Of all responses of a group; None while one is missing."""
        scores = []
        for response in range(self.scheduler.rules.responses_per_group):
            answer = self._answers.get((group, response))
            if answer is None or answer.score is None:
                return None
            scores.append(answer.score)
        return scores

    def dispatch(self) -> None:
        """Has the backend do what the scheduler says, until it says no more."""
        assigned: Sequence[Assignment] = ()
        is_first = True
        while assigned or is_first:
            is_first = False
            dropped = self.scheduler.dropped()
            if dropped:
                self._forget(dropped)
                self._job.forget(dropped)
            for worker, request in self.scheduler.to_abort():
                self._backend.abort(worker, request)
            level = self.scheduler.end.level
            if level != self._level:
                self._level = level
                if level is not None:
                    self._backend.pause(level)
            assigned = self.scheduler.assign()
            for worker, request in assigned:
                # One before it in this loop may have ended the step.
                if self.scheduler.queue.runs(worker, request):
                    self._begin(worker, request)

    def _begin(self, worker: str, request: Request) -> None:
        end = self.scheduler.end
        visit = self._job.visit(request.group, end)
        prompt = self._job.prompt(request.group, visit)
        demonstration = self._job.demonstration(prompt, request.response)
        if demonstration is not None:
            self.scheduler.finished(worker, request)
            self._job.store.add(request, demonstration)
            self._answers[_place(request)] = self._answer_of(_place(request), demonstration, 0)
            self._rewards.give(request, prompt, demonstration)
        elif self.scheduler.limit(request.group) == 0:
            self.scheduler.paused(worker, request)
        else:
            step = end.step_of(request.group)
            assert step is not None, "it is of a step to come"
            begin = end.begin_of(request.group)
            self._backend.submit(worker, GenerationRequest(request, step + 1, visit, begin))

    def _answer_of(self, place: Place, completion: Completion, num_new: int) -> Answer:
        """Of a response that no worker has ended in this step."""
        length = len(completion.token_ids)
        holder = self._backend.holder(None, place[0])
        return Answer(holder, length, completion.truncated, completion.spans, num_new)

    def _forget(self, groups: set[int]) -> None:
        for place in [place for place in self._answers if place[0] in groups]:
            del self._answers[place]

    @property
    def is_ready(self) -> bool:
        """Whether the next step has its groups, and all that it keeps is scored."""
        if not self.scheduler.is_ready:
            return False
        return all(
            answer.score is not None or not self._counts(place, answer)
            for place, answer in self._answers.items()
            if self.scheduler.end.level is not None
        )

    def _counts(self, place: Place, answer: Answer) -> bool:
        """Whether a response ended within what is known of the level of its step."""
        limit = self.scheduler.limit(place[0])
        return limit is None or answer.num_new <= limit

    @property
    def only_scores(self) -> bool:
        """Whether all that is wanted so far is sampled."""
        queue = self.scheduler.queue
        return queue.num_running + queue.num_waiting == 0

    @property
    def progress(self) -> Progress:
        queue = self.scheduler.queue
        num_left = queue.num_running + queue.num_waiting
        return Progress(
            num_done=self.scheduler.end.num_answered,
            num_wanted=self.scheduler.end.num_answered + num_left,
            num_tokens=sum(worker.num_tokens for worker in self._progress.values()),
            longest=max((worker.longest for worker in self._progress.values()), default=0),
            age=max(0, self.scheduler.version - self.scheduler.oldest_needed),
        )

    # At its end

    def take(self, sampled_tokens: int | None = None) -> StepSummary:
        """The next step, when it is ready. ``sampled_tokens``: by all workers since the last one;
        None: not counted."""
        kept = {place: one for place, one in self._answers.items() if self._counts(place, one)}
        groups = self.scheduler.take()
        self._level = None
        size = self.scheduler.rules.responses_per_group
        shown = groups.groups or groups.refused[-self.scheduler.rules.groups_per_step :]
        answers = [kept[group, response] for group in shown for response in range(size)]
        refused = {}
        for group in groups.refused:
            scores = [kept[group, response].score for response in range(size)]
            refused[group] = (self._job.visit(group), [one for one in scores if one is not None])
        open_groups = groups.limits.keys() - {*groups.groups, *groups.refused}
        used = sum(answer.num_new for answer in answers)
        ended = frozenset(place for place in kept if place[0] in open_groups)
        for group in open_groups:
            for response in range(size):
                there = kept.get((group, response))
                used += groups.limits[group] if there is None else there.num_new
        if groups.level is not None:
            self._answers = {
                place: one._replace(num_new=0, holder=self._backend.holder(None, place[0]))
                for place, one in kept.items()
            }
        self._forget({*groups.groups, *groups.refused})
        return StepSummary(
            groups=groups,
            shown=shown,
            visits={group: self._job.visit(group) for group in shown},
            answers=answers,
            refused=refused,
            ended=ended,
            discarded_tokens=0 if sampled_tokens is None else sampled_tokens - used,
        )

    # For a checkpoint

    def state(self) -> dict[str, Any]:
        """Plain values; tokens are in the store."""
        scores = [
            {"group": group, "response": response, **saved_score(answer.score)}
            for (group, response), answer in sorted(self._answers.items())
            if answer.score is not None
        ]
        return {"scheduler": self.scheduler.state(), "scores": scores}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse, but for the scheduler; the store is restored already."""
        scores: dict[Place, Score] = {}
        for saved in state["scores"]:
            values = dict(saved)
            place = values.pop("group"), values.pop("response")
            scores[place] = restored_score(values)
        for place, completion, is_held in self._job.store.places():
            if is_held and place not in scores:
                continue  # it has not ended
            there = self._job.store.length(Request(0, *place))
            is_sampled = completion.weight_version != DEMONSTRATED
            num_new = len(completion.token_ids) - there if is_sampled and not is_held else 0
            answer = self._answer_of(place, completion, num_new)
            self._answers[place] = answer._replace(score=scores.get(place))
        self._score_the_rest()

    def _score_the_rest(self) -> None:
        """Responses that had ended, and whose reward no checkpoint has."""
        scheduler = self.scheduler
        for (group, response), answer in self._answers.items():
            completion = self._job.store.get((group, response))
            step = scheduler.end.step_of(group)
            if answer.score is None and completion is not None and step is not None:
                version = scheduler.rules.version_of(step)
                prompt = self._job.prompt(group, self._job.visit(group))
                self._rewards.give(Request(version, group, response), prompt, completion)
        for judged_version, group in self.scheduler.end.to_judge():
            self._judge(judged_version, group)


def _place(request: Request) -> Place:
    return request.group, request.response
