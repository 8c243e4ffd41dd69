"""Servers that die, fall silent, come and are slow at random, slow verdicts, evaluations, restarts:
what is trained is what a plain loop over the prompts trains."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_rl.data.loader import PromptLoader, numbered
from megatron_rl.engine.serving.client import (
    RequestFailedError,
    ServerLostError,
    ServerUnreachableError,
)
from megatron_rl.rollouts.backends import failures, servers
from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.readiness import FleetEvent
from megatron_rl.rollouts.backends.requests import ServerParts
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.runtime.registry import Registration
from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score, VersionSpan
from tests.unit.rollouts.server_fakes import (
    Group,
    answers,
    groups_of,
    job_of,
    text_of,
    tokens_of,
)
from tests.unit.trainer.fakes import prompts

STEPS = 6
SEEDS = 5
PLAIN = StepRules(groups_per_step=3, responses_per_group=2)
FILTERED = replace(PLAIN, max_rounds=4)
SETTINGS = {
    "synchronous, filtered": FILTERED,
    "one step behind": replace(PLAIN, staleness=1),
    "one step behind, filtered": replace(FILTERED, staleness=1),
    "two steps behind, filtered": replace(FILTERED, staleness=2),
    "free": replace(PLAIN, staleness=2, lockstep=False),
    "free, filtered": replace(FILTERED, staleness=2, lockstep=False),
}
ASKED = [replace(prompt, uid=f"held-out:{prompt.uid}") for prompt in prompts(3)]
HELD_OUT = Sampling(2, 4, seed=-1)


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:2], "big")


def tokens(prompt: Prompt, step: int, response: int, version: int) -> tuple[int, ...]:
    """Of a response: they say what it is the answer to."""
    return digest(prompt.uid), step, response, version


def verdict(prompt: Prompt, ids: Sequence[int]) -> Score:
    """Follows from prompt and step; the reward from all tokens."""
    is_wanted = digest(prompt.uid, ids[1]) % 5 < 2
    return Score(float(digest(prompt.uid, list(ids))), is_wanted)


def loader() -> PromptLoader:
    """Few prompts: a step that looks at many has some of them again."""
    return PromptLoader(prompts(5), seed=1, shuffle=True)


def trained(rules: StepRules) -> Iterator[list[Prompt]]:
    """The definition, as a loop that looks at one prompt after the other."""
    plain = loader()
    prompts_by_number: list[Prompt] = []
    limit = rules.groups_per_step * (rules.max_rounds or 1)
    step = start = 0
    while True:
        groups: list[Prompt] = []
        number = start
        while len(groups) < rules.groups_per_step and number - start < limit:
            while len(prompts_by_number) <= number:
                prompts_by_number += plain.take(1)
            plain_uids = [one.uid for one in prompts_by_number[start:number]]
            prompt = prompts_by_number[number]
            prompt = numbered(prompt, 1 + plain_uids.count(prompt.uid))
            number += 1
            if not rules.is_filtered or verdict(prompt, tokens(prompt, step, 0, 0)).correct:
                groups.append(prompt)
        yield groups
        start = number
        step += 1


@dataclass
class World:
    """Servers in the roles of registry and clients, and a judge, with one random source each: they
    belong to different threads."""

    rules: StepRules
    seed: int
    versions: dict[str, int] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    losses: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    num_servers: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"servers {self.seed}")
        self.judge_rng = random.Random(f"judge {self.seed}")
        self.trainer_rng = random.Random(f"trainer {self.seed}")
        self.death_rate = self.trainer_rng.choice([0.0, 0.02, 0.1])
        self.judge_s = self.trainer_rng.choice([0.0, 0.0, 0.002])

    def look(self) -> Mapping[str, Registration]:
        may_come = len(self.registered) < 4
        if may_come and self.rng.random() < (0.1 if self.registered else 0.5):
            self.num_servers += 1
            self.registered.add(f"server {self.num_servers}")
        return {name: Registration(name, name, 0, 9.0) for name in sorted(self.registered)}

    def remove(self, name: str) -> None:
        self.registered.discard(name)

    def connect(self, url: str) -> Server:
        return Server(self, url)

    def switch(self, name: str, version: int) -> None:
        """In a thread: follows from the number of the server and the version."""
        if name in self.dead or digest(self.seed, name, version) % 20 == 0:
            raise ServerLostError(f"{name} does not go over")
        assert self.staged[name] == version
        time.sleep(digest(version, name) % 4 / 1000)
        self.versions[name] = version

    def score(
        self, asked: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        time.sleep(self.judge_s * self.judge_rng.random())
        return list(map(verdict, asked, map(tokens_of, texts)))


@dataclass
class Server:
    world: World
    name: str

    async def generate(
        self, prompt: Prompt, sampling: Sampling, response: int, so_far: Sequence[int] = ()
    ) -> Completion:
        world = self.world
        assert sampling.seed is not None
        begin = world.versions[self.name]
        for _ in range(world.rng.randint(1, 6)):
            self.look(prompt, sampling.seed, response)
            await asyncio.sleep(0)
        if self.name not in world.registered:
            await asyncio.Event().wait()  # its lease has ended, and it says nothing
        end = world.versions[self.name]
        assert begin == end or not world.rules.lockstep, "weights changed under a request"
        spans = (VersionSpan(begin, 1), VersionSpan(end, 4))
        return Completion(
            tokens(prompt, sampling.seed, response, begin),
            [-0.5] * 4,
            truncated=False,
            weight_version=begin,
            spans=spans[1:] if begin == end else spans,
        )

    def look(self, *request: Any) -> None:
        world = self.world
        prompt, *rest = request
        request = (prompt.uid, *rest)
        if world.rng.random() < world.death_rate and world.losses[request] == 0:
            world.losses[request] += 1
            kind = world.rng.choice(["fails", "dies", "dies", "falls silent", "falls silent"])
            if kind == "fails":
                raise RequestFailedError(f"{self.name} fails")
            world.registered.discard(self.name)
            if kind == "dies":
                world.dead.add(self.name)
        if self.name in world.dead:
            raise world.rng.choice([ServerLostError, ServerUnreachableError])(
                f"{self.name} is dead"
            )

    async def score(self, token_ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        raise NotImplementedError

    async def close(self) -> None: ...


class Trainer:
    """What the source does on rank 0, and restarts from checkpoints."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: list[Sequence[Group]] = []
        self._rng = world.trainer_rng
        self._saved: tuple[int, bytes] | None = None

    def run(self) -> None:
        self._start(None)
        self._publish(0)
        while len(self.steps) < STEPS:
            while isinstance(news := self._dispatcher.wait(), FleetEvent):
                self._welcome(news, len(self.steps))
            self.steps.append(groups_of(self._dispatcher.take()))
            if self._rng.random() < 0.2:
                self._evaluate()
            self._publish(len(self.steps))
            if self._rng.random() < 0.4:
                while isinstance(news := self._dispatcher.settled(), FleetEvent):
                    self._welcome(news, len(self.steps))
                self._saved = len(self.steps), pickle.dumps(self._dispatcher.state())
            if self._saved and self._rng.random() < 0.3:
                self._restart(*self._saved)
        self._dispatcher.close()

    def _start(self, saved: Mapping[str, Any] | None) -> None:
        world = self.world
        job = job_of(
            world.rules,
            prompts(5),
            lambda verdicts: verdicts[0] or not world.rules.is_filtered,
            each_step=1,
        )
        if saved is not None:
            job.stream.restore(saved["prompts"])
            job.store.restore(saved["store"])
        parts = ServerParts(
            connect=world.connect,
            switch=world.switch,
            rewards=lambda wake: RewardThread(world, text_of, at_most=6, wake=wake),
            capacity=self._rng.randint(1, 5),
            timeouts=RequestTimeouts(None),
            longest_response=4,
        )
        self._dispatcher = ServerBackend(job, parts, world, saved)

    def _restart(self, step: int, state: bytes) -> None:
        self._dispatcher.close()
        self._dispatcher._switches.shutdown()  # what it began may end after it
        del self.steps[step:]
        self._start(pickle.loads(state))
        self._publish(step)

    def _publish(self, version: int) -> None:
        while isinstance(servers := self._dispatcher.drained(version), FleetEvent):
            self._welcome(servers, version - 1)
        lost = {name: "no room" for name in servers if self._rng.random() < 0.05}
        updated = {name: url for name, url in servers.items() if name not in lost}
        staged = self.world.rules.staleness > 0
        where = self.world.staged if staged else self.world.versions
        where |= dict.fromkeys(updated, version)
        self._dispatcher.published(version, updated, lost, staged=staged)

    def _welcome(self, news: FleetEvent, version: int) -> None:
        """``version``: the newest."""
        if news.kind == "join":
            if news.version is not None:
                assert version - 1 <= news.version <= version, "the trainer holds two"
                version = news.version
            self.world.versions |= dict.fromkeys(news.servers, version)
            self._dispatcher.published(version, news.servers, {})

    def _evaluate(self) -> None:
        version = len(self.steps) - 1
        while isinstance(groups := answers(self._dispatcher, ASKED, HELD_OUT), FleetEvent):
            self._welcome(groups, version)
        pairs = [(prompt, number) for prompt in ASKED for number in range(2)]
        for (prompt, number), (one, score) in zip(pairs, groups, strict=True):
            assert tuple(one.token_ids) == tokens(prompt, -1, number, version)
            assert score == verdict(prompt, one.token_ids)


def check(rules: StepRules, steps: Sequence[Sequence[Group]]) -> None:
    for step, (groups, expected) in enumerate(zip(steps, trained(rules), strict=False)):
        assert [group.prompt for group in groups] == expected
        for group in groups:
            assert len(group.completions) == rules.responses_per_group
            expected_scores = [verdict(group.prompt, one.token_ids) for one in group.completions]
            assert group.scores == expected_scores
            for number, one in enumerate(group.completions):
                version = one.weight_version
                assert tuple(one.token_ids) == tokens(group.prompt, step, number, version)
                newest = rules.version_of(step) if rules.lockstep else step
                assert rules.version_of(step) <= version <= newest


@pytest.mark.parametrize("name", SETTINGS)
def test_random_servers_train_what_a_plain_loop_trains(name: str, monkeypatch, bounded_waits):
    monkeypatch.setattr(servers, "LOOK_EVERY_S", 0.001)
    # Servers are lost so often that prompts that end none of them are there three times.
    monkeypatch.setattr(failures, "MOST_SERVERS", 1000)
    rules = SETTINGS[name]
    before = set(threading.enumerate())
    num_lost = 0
    for seed in range(SEEDS):
        world = World(rules, seed)
        trainer = Trainer(world)
        trainer.run()
        check(rules, trainer.steps)
        num_lost += sum(world.losses.values())
    assert num_lost > 0
    # Threads of earlier tests are not counted: a worker of pytest runs many.
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10.0)
        assert not thread.is_alive(), f"{thread} outlived its dispatcher"
