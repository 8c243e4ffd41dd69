"""Rank 0's part of every generation: it holds the scheduler, hears of ended responses and of
rewards, and has a backend begin, stop and pause responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron_rl.rollouts.demonstrations import DEMONSTRATED
from megatron_rl.rollouts.environments.outcomes import Outcome
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.store import Place, restored_outcome, saved_outcome, saved_score
from megatron_rl.runtime.display import Progress
from megatron_rl.scheduling.end_of_step import StepGroups
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Score, VersionSpan, num_appended


class GenerationRequest(NamedTuple):
    """A response that a worker is to sample.

    Attributes:
        request: Which response, and the version of the weights.
        step: The step that it is sampled for, counted from 1.
        visit: Tells the prompt from others like it in the step, see ``PromptStream.prompt``.
        begin: The part of the step's level that had passed when its group was begun, in tokens.
    """

    request: Request
    step: int
    visit: int
    begin: int = 0


class Ended(NamedTuple):
    """A worker has ended a response; its tokens stay with the backend. ``length``: of the whole;
    ``outcome``: of its environment, kept until the response is scored."""

    worker: str
    request: Request
    length: int
    truncated: bool
    spans: tuple[VersionSpan, ...]
    outcome: Outcome | None = None

    @classmethod
    def of(
        cls, worker: str, request: Request, whole: Completion, outcome: Outcome | None = None
    ) -> Ended:
        return cls(worker, request, len(whole.token_ids), whole.truncated, whole.spans, outcome)


class Unfinished(NamedTuple):
    """A worker has stopped before the end of a response. ``is_paused``: it does not continue in
    this step, and its tokens stay with the backend; else the worker has failed at it."""

    worker: str
    request: Request
    is_paused: bool


class Scored(NamedTuple):
    """The reward of a response that has ended."""

    request: Request
    score: Score


class WorkerProgress(NamedTuple):
    """Tokens that a worker has sampled, and the longest response still running."""

    worker: str
    num_tokens: int
    longest: int


Event = Ended | Unfinished | Scored | WorkerProgress


class GenerationBackend(Protocol):
    """What generates, as rank 0 sees it. It tells the scheduler of its workers, each of which takes
    so many requests at a time as it joins with (``capacity``)."""

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        """Begins a response, or continues it behind the tokens that it has from earlier steps."""

    def abort(self, worker: str, request: Request) -> None:
        """Ends a response without an answer."""

    def pause(self, level: int) -> None:
        """From now on ends every response that has sampled ``level`` tokens in this step (less
        ``GenerationRequest.begin``), and keeps its tokens."""

    def events(self) -> Sequence[Event]:
        """What has happened since the last call."""

    def holder(self, worker: str | None, group: int) -> int:
        """The rank with the tokens of a response that ended on ``worker``; None: it ended in an
        earlier step, or its prompt brought it along."""


class Answer(NamedTuple):
    """A response that has ended, without its tokens.

    Attributes:
        holder: The rank that has its tokens.
        spans: Which weights sampled which of its tokens.
        num_there: Tokens that it had at the start of the present step.
        score: None while it is not known.
    """

    holder: int
    length: int
    truncated: bool
    spans: tuple[VersionSpan, ...]
    num_there: int
    score: Score | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled in the present step."""
        behind = self.num_there
        return self.length - behind - num_appended(self.spans, behind)

    @property
    def num_earlier(self) -> int:
        """Tokens that were sampled in steps before."""
        return self.length - num_appended(self.spans) - self.num_sampled


@dataclass(frozen=True)
class StepSummary:
    """The responses of a step without their tokens; equal on every rank.

    Attributes:
        groups: The groups that are trained.
        shown: The groups of ``answers``: those that are trained, or, where dynamic sampling left
            none, the last that it refused, for the log.
        visits: Of the prompts of the groups shown, see ``PromptStream.prompt``.
        answers: In canonical order.
        refused: Visit and scores of each group that dynamic sampling refused, where hooks see them.
        ended: Responses that have ended, of groups that continue in the next step.
        discarded_tokens: Sampled for responses, or parts of them, that no step trains; with engines
            of a launch also what open groups keep, which the caller subtracts.
        metrics: Metrics of the source.
    """

    groups: StepGroups
    shown: Sequence[int]
    visits: Mapping[int, int]
    answers: Sequence[Answer]
    refused: Mapping[int, tuple[int, Sequence[Score]]] = field(default_factory=dict)
    ended: frozenset[Place] = frozenset()
    discarded_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Dispatcher:
    """Decides nothing itself: the scheduler decides which response is sampled where, its ``end``
    which groups a step trains, the job how a response is sampled."""

    job: GenerationJob
    scheduler: Scheduler
    backend: GenerationBackend
    rewards: RewardThread
    _answers: dict[Place, Answer] = field(default_factory=dict, init=False)
    # Of responses that wait for their scores.
    _outcomes: dict[Place, Outcome] = field(default_factory=dict, init=False)
    _progress: dict[str, WorkerProgress] = field(default_factory=dict, init=False)
    _level: int | None = field(default=None, init=False)  # the one that the backend was given

    # While a step is generated

    def turn(self) -> bool:
        """Handles new events and dispatches what follows; returns whether there were any."""
        events = self.backend.events()
        # All of them before anything is assigned: a worker that has ended two responses is free for
        # two, and an end that drops a group takes its requests out of the queue.
        for event in events:
            self._on_event(event)
        self._dispatch()
        return bool(events)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Ended):
            there = self.job.store.length(event.request.place)
            if self.scheduler.finished(event.worker, event.request, event.length - there):
                holder = self.backend.holder(event.worker, event.request.group)
                answer = Answer(holder, event.length, event.truncated, event.spans, there)
                self._answers[event.request.place] = answer
                if event.outcome is not None:
                    self._outcomes[event.request.place] = event.outcome
        elif isinstance(event, Scored):
            self._outcomes.pop(event.request.place, None)
            answer = self._answers.get(event.request.place)
            if answer is not None:  # else its group was dropped meanwhile
                self._answers[event.request.place] = answer._replace(score=event.score)
                self._judge(event.request.version, event.request.group)
        elif isinstance(event, Unfinished):
            follow = self.scheduler.paused if event.is_paused else self.scheduler.queue.fail
            follow(event.worker, event.request)
        else:
            self._progress[event.worker] = event

    def _judge(self, version: int, group: int) -> None:
        """Once the last score of a group is there, says whether the method wants the group."""
        size = self.scheduler.rules.responses_per_group
        answers = [self._answers.get((group, response)) for response in range(size)]
        scores = [answer.score for answer in answers if answer and answer.score is not None]
        # A score may come before its siblings, and under partial rollouts from a step before.
        if len(scores) == size and self.scheduler.end.is_whole(group):
            self.scheduler.judged(version, group, wanted=self.job.wants(scores))

    def _dispatch(self) -> None:
        """Has the backend do what the scheduler says, until that says no more: a demonstration ends
        as it begins, which may drop groups, set the level and ask for more."""
        while True:
            # Dropped groups first: one may be asked for again in the same turn, for the next step,
            # and its old answers must be gone before the new requests begin.
            dropped = self.scheduler.dropped()
            if dropped:
                self._forget(dropped)
                self.job.forget(dropped)
            # Aborts before submits: they free the places that are assigned below.
            for worker, request in self.scheduler.to_abort():
                self.backend.abort(worker, request)
            # The level before submits: a response that continues may have come to it already.
            level = self.scheduler.end.level
            if level != self._level:
                self._level = level
                if level is not None:
                    self.backend.pause(level)
            assigned = self.scheduler.assign()
            if not assigned:
                break
            for worker, request in assigned:
                # One before it in this loop may have ended the step.
                if self.scheduler.queue.runs(worker, request):
                    self._begin(worker, request)

    def _begin(self, worker: str, request: Request) -> None:
        end = self.scheduler.end
        visit = self.job.stream.visit(request.group, end.admission(request.group))
        prompt = self.job.stream.prompt(request.group, visit)
        demonstration = self.job.demonstration(prompt, request.response)
        if demonstration is not None:
            self.scheduler.finished(worker, request)
            self.job.store.put(request.place, demonstration)
            self._answers[request.place] = self._answer_of(request.place, demonstration)
            self.rewards.give(request, prompt, demonstration)
        elif self.scheduler.limit(request.group) == 0:
            self.scheduler.paused(worker, request)
        else:
            step = end.step_of(request.group)
            assert step is not None, "it is of a step to come"
            begin = end.begin_of(request.group)
            # Steps of a run are counted from 1, those of the scheduler from 0.
            self.backend.submit(worker, GenerationRequest(request, step + 1, visit, begin))

    def _answer_of(self, place: Place, completion: Completion) -> Answer:
        """The answer for a response that no worker has ended in this step."""
        length = len(completion.token_ids)
        holder = self.backend.holder(None, place[0])
        return Answer(holder, length, completion.truncated, completion.spans, num_there=length)

    def _forget(self, groups: set[int]) -> None:
        for of_place in (self._answers, self._outcomes):
            for place in [place for place in of_place if place[0] in groups]:
                del of_place[place]

    @property
    def is_ready(self) -> bool:
        """Whether the next step has its groups, and all that it keeps is scored."""
        if not self.scheduler.is_ready:
            return False
        # Whole groups are judged, hence scored. At a level, responses of groups that stay open have
        # ended too: they wait for their scores, which no later step asks for again.
        return self.scheduler.end.level is None or all(
            answer.score is not None or not self._counts(place, answer)
            for place, answer in self._answers.items()
        )

    def _counts(self, place: Place, answer: Answer) -> bool:
        """Whether a response ended within the level of its step, as far as that is known."""
        limit = self.scheduler.limit(place[0])
        return limit is None or answer.length - answer.num_there <= limit

    @property
    def num_left(self) -> int:
        """How many of the responses asked for so far are not sampled yet."""
        return self.scheduler.queue.num_running + self.scheduler.queue.num_waiting

    @property
    def progress(self) -> Progress:
        num_done = self.scheduler.end.num_answered
        return Progress(
            num_done=num_done,
            num_wanted=num_done + self.num_left,
            num_tokens=sum(worker.num_tokens for worker in self._progress.values()),
            longest=max((worker.longest for worker in self._progress.values()), default=0),
            age=max(0, self.scheduler.version - self.scheduler.end.oldest_needed),
        )

    # At its end

    def take(self, sampled_tokens: int | None = None) -> StepSummary:
        """The next step, when it is ready. ``sampled_tokens``: by all workers since the last step;
        None: not known, as a server does not say what it had of a request that was taken back."""
        # Before the scheduler's take, which begins the next step: its level is another.
        kept = {place: one for place, one in self._answers.items() if self._counts(place, one)}
        groups = self.scheduler.take()
        self._level = None
        size = self.scheduler.rules.responses_per_group
        shown = groups.groups or groups.refused[-self.scheduler.rules.groups_per_step :]
        answers = [kept[group, response] for group in shown for response in range(size)]
        refused = {}
        num_refused = num_earlier = 0  # tokens, of this step and of those before it
        for group in groups.refused:
            responses = [kept[group, response] for response in range(size)]
            visit = self.job.stream.visit(group)
            refused[group] = (visit, [one.score for one in responses if one.score is not None])
            if group not in shown:
                sampled = [one for one in responses if one.spans[0].version != DEMONSTRATED]
                num_refused += sum(one.num_sampled for one in sampled)
                num_earlier += sum(one.num_earlier for one in sampled)
        used = sum(answer.num_sampled for answer in answers)
        if groups.level is not None:
            # The caller sends open responses to every rank; they count from 0 in the next step.
            self._answers = {
                place: one._replace(
                    num_there=one.length, holder=self.backend.holder(None, place[0])
                )
                for place, one in kept.items()
            }
            self._outcomes = {}  # what counts is scored
        self._forget(groups.gone)
        return StepSummary(
            groups=groups,
            shown=shown,
            visits={group: self.job.stream.visit(group) for group in shown},
            answers=answers,
            refused=refused,
            ended=frozenset(place for place in kept if place[0] in groups.open),
            discarded_tokens=num_earlier
            + (num_refused if sampled_tokens is None else sampled_tokens - used),
        )

    # For a checkpoint

    def state(self) -> dict[str, Any]:
        """Plain values; tokens are in the store."""
        scores = [
            {"group": group, "response": response, **saved_score(answer.score)}
            for (group, response), answer in sorted(self._answers.items())
            if answer.score is not None
        ]
        state = {"scheduler": self.scheduler.state(), "scores": scores}
        outcomes = [
            {"group": group, "response": response, **saved_outcome(outcome)}
            for (group, response), outcome in sorted(self._outcomes.items())
        ]
        return {**state, "outcomes": outcomes} if outcomes else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse, but for the scheduler; the store is restored already."""
        scores: dict[Place, Score] = {}
        for saved in state["scores"]:
            values = dict(saved)
            place = values.pop("group"), values.pop("response")
            scores[place] = Score(**values)
        for saved in state.get("outcomes", ()):
            values = dict(saved)
            place = values.pop("group"), values.pop("response")
            self._outcomes[place] = restored_outcome(values)
        for place, completion, is_held in self.job.store.places():
            if is_held and place not in scores:
                continue  # it has not ended
            answer = self._answer_of(place, completion)._replace(score=scores.get(place))
            if completion.weight_version != DEMONSTRATED and not is_held:
                answer = answer._replace(num_there=self.job.store.length(place))
            self._answers[place] = answer
        # Responses that had ended, but had no reward yet when the checkpoint was made.
        for (group, response), answer in self._answers.items():
            completion = self.job.store.get((group, response))
            step = self.scheduler.end.step_of(group)
            if answer.score is None and completion is not None and step is not None:
                version = self.scheduler.rules.version_of(step)
                prompt = self.job.stream.prompt(group, self.job.stream.visit(group))
                outcome = self._outcomes.get((group, response))
                self.rewards.give(Request(version, group, response), prompt, completion, outcome)
        for judged_version, group in self.scheduler.end.to_judge():
            self._judge(judged_version, group)
