"""Servers that answer, fall silent, die and come, and what the source does with their dispatcher:
what they answer follows from the request and the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.data.loader import PromptLoader
from megatron_rl.engine.serving.client import (
    RequestFailedError,
    ServerLostError,
    ServerUnreachableError,
)
from megatron_rl.rollouts.backends.readiness import FleetEvent
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.jobs import GenerationJob, answers_to
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.rollouts import SampledStep
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.runtime.registry import Registration
from megatron_rl.scheduling.end_of_step import Admission, StepRules
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score

RULES = StepRules(groups_per_step=3, responses_per_group=2, staleness=1)
IN_TWO_STEPS = 2 * RULES.groups_per_step * RULES.responses_per_group  # requests


@dataclass
class Fleet:
    """Servers by name, in the roles of registry and clients. A server in ``silent`` takes requests
    and answers none, one in ``answers`` answers the first so many; one in ``dead`` refuses them.
    One in ``stuck`` does not go over to what it has in ``staged``."""

    versions: dict[str, int] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    answers: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    asked: list[tuple[str, int, str, int]] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    refuses: str = ""
    unreadable: str = ""  # why nobody can look
    off: set[str] = field(default_factory=set)  # take no connections
    ill: set[str] = field(default_factory=set)  # fail at every request
    fails_once: str = ""  # a prompt at which a server fails, once
    poison: str = ""  # a prompt that ends every server
    staged: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)

    def look(self) -> Mapping[str, Registration]:
        if self.unreadable:
            raise OSError(self.unreadable)
        return {name: Registration(name, f"at {name}", 0, 9.0) for name in sorted(self.registered)}

    def remove(self, name: str) -> None:
        self.registered.discard(name)

    def connect(self, url: str) -> Server:
        return Server(self, url.removeprefix("at "))

    def switch(self, url: str, version: int) -> None:
        name = url.removeprefix("at ")
        if name in self.dead | self.stuck:
            raise ServerLostError(f"{name} does not answer")
        assert self.staged[name] == version
        self.versions[name] = version


@dataclass
class Server:
    fleet: Fleet
    name: str
    is_closed: bool = False

    async def generate(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int] = ()
    ) -> Completion:
        fleet = self.fleet
        version = fleet.versions[self.name]
        fleet.asked.append((self.name, version, prompt.uid, response))
        number = sum(name == self.name for name, *_ in fleet.asked)
        is_silent = number > fleet.answers.get(self.name, number)
        await asyncio.sleep(0.001)
        if self.name in fleet.off:
            raise ServerUnreachableError(f"{self.name} is off")
        if prompt.uid == fleet.fails_once or self.name in fleet.ill:
            fleet.fails_once = ""
            raise RequestFailedError(f"{self.name} fails")
        if prompt.uid == fleet.poison:
            fleet.dead.add(self.name)
        if fleet.refuses:
            raise ValueError(fleet.refuses)
        while (is_silent or self.name in fleet.silent) and self.name not in fleet.dead:
            await asyncio.sleep(0.001)
        if self.name in fleet.dead:
            raise ServerLostError(f"{self.name} is dead")
        token = sum(prompt.uid.encode()) + 7 * response + 31 * version + (sampling.seed or 0)
        return Completion((token, version), (-0.5, -1.0), False, version)

    async def score(self, token_ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        self.fleet.scored.append(self.name)
        while self.name in self.fleet.silent and not self.is_closed:
            await asyncio.sleep(0.001)
        if self.name in self.fleet.dead or self.is_closed:
            raise ServerLostError(f"{self.name} is dead")
        return [float(token) for token in token_ids[1:]]

    async def close(self) -> None:
        self.is_closed = True


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def tokens_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


class FirstTokenIsOdd:
    """The reward of these tests."""

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        firsts = [tokens_of(text)[0] for text in texts]
        return [Score(float(first % 2), first % 2 == 1) for first in firsts]


class PlainSeeds(SamplingPlan):
    """The seed is a multiple of the step, counted from 0."""

    def __init__(self, each: int = 1000) -> None:
        super().__init__(Sampling(2, 4))
        self.each = each

    def __call__(self, step: int, prompt: Prompt, version: int, turn: int = 0) -> Sampling:
        return Sampling(2, 4, seed=self.each * (step - 1))

    def published(self, version: int) -> None: ...


def job_of(
    rules: StepRules,
    prompts: Sequence[Prompt],
    wants: Callable[[Sequence[bool]], bool] | None = None,
    each_step: int = 1000,
) -> GenerationJob:
    return GenerationJob(
        rules=rules,
        stream=PromptStream(PromptLoader(prompts, seed=1, shuffle=True)),
        plan=PlainSeeds(each_step),
        wants_group=wants or (lambda verdicts: True),
        verdicts=VerdictRules(1, 0.0),
    )


class Group(NamedTuple):
    """A prompt with what was answered to it."""

    prompt: Prompt
    completions: Sequence[Completion]
    scores: Sequence[Score]


def groups_of(sampled: SampledStep) -> list[Group]:
    """On the rank that has all tokens."""
    size = len(sampled.completions) // len(sampled.prompts)
    scores = [answer.score for answer in sampled.summary.answers]
    groups = []
    for number, prompt in enumerate(sampled.prompts):
        rows = slice(number * size, (number + 1) * size)
        groups.append(Group(prompt, sampled.completions[rows], scores[rows]))
    return groups


def answers(
    dispatcher: ServerBackend, asked: Sequence[Prompt], sampling: Sampling
) -> list[tuple[Completion, Score | None]] | FleetEvent:
    """To prompts that are not of the stream, one prompt after the other."""
    found = dispatcher.generate(answers_to(asked, sampling))
    if isinstance(found, FleetEvent):
        return found
    scores = [answer.score for answer in found.summary.answers]
    return list(zip(found.completions, scores, strict=True))


def publish(dispatcher: ServerBackend, fleet: Fleet, version: int) -> None:
    """What the source does: everybody who is there gets the weights; where k > 0, beside the old
    ones."""
    servers = dispatcher.drained(version)
    while isinstance(servers, FleetEvent):
        assert servers.kind == "starved" or welcome(dispatcher, fleet, servers, version - 1)
        servers = dispatcher.drained(version)
    staged = dispatcher._scheduler.rules.staleness > 0
    where = fleet.staged if staged else fleet.versions
    where |= dict.fromkeys(servers, version)
    dispatcher.published(version, servers, {}, staged=staged)


def welcome(dispatcher: ServerBackend, fleet: Fleet, news: FleetEvent, version: int) -> bool:
    assert news.kind == "join"
    assert news.version in (None, version, version - 1), "the trainer holds two versions"
    version = version if news.version is None else news.version
    fleet.versions |= dict.fromkeys(news.servers, version)
    dispatcher.published(version, news.servers, {})
    return True


def step(dispatcher: ServerBackend, fleet: Fleet, version: int) -> list[Group]:
    """One step of the trainer: the groups that it trains, and the publication that follows."""
    while isinstance(news := dispatcher.wait(), FleetEvent):
        assert news.kind == "starved" or welcome(dispatcher, fleet, news, version - 1)
    groups = groups_of(dispatcher.take())
    publish(dispatcher, fleet, version)
    return groups


def contents(steps: Sequence[Sequence[Group]]) -> list:
    return [
        (group.prompt.uid, [one.token_ids.tolist() for one in group.completions], group.scores)
        for groups in steps
        for group in groups
    ]


def start_published(start, fleet: Fleet, *more, **changes) -> ServerBackend:
    """Those who are there have weights."""
    dispatcher = start(fleet, *more, **changes)
    publish(dispatcher, fleet, 0)
    return dispatcher


def contents_of(dispatcher: ServerBackend, fleet: Fleet, first: int, last: int) -> list:
    """What is trained in these steps."""
    return contents([step(dispatcher, fleet, version) for version in range(first, last + 1)])


def run(start, fleet: Fleet, num_steps: int, rules: StepRules = RULES) -> list:
    return contents_of(start_published(start, fleet, rules), fleet, 1, num_steps)


def uid_of(stream: PromptStream, step: int, start: int, number: int) -> str:
    """Of a group of the step that begins with ``start``."""
    visit = stream.visit(number, Admission(step, (), lambda place: start + place))
    return stream.prompt(number, visit).uid
