"""Random events, 10^5 of them: what is trained is what a plain loop over the prompts trains."""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request

EVENTS = 100_000
PLAIN = StepRules(groups_per_step=5, responses_per_group=3)
FILTERED = replace(PLAIN, max_rounds=3)
SETTINGS = {
    "synchronous": PLAIN,
    "filtered": FILTERED,
    "one step behind": replace(PLAIN, staleness=1),
    "two steps behind, filtered": replace(FILTERED, staleness=2),
    "free": replace(PLAIN, staleness=2, lockstep=False),
    "free, filtered": replace(FILTERED, staleness=1, lockstep=False),
}

Wants = Callable[[int, int], bool]


def wants(share: float) -> Wants:
    """A verdict on a group that depends on its number and its weights alone."""

    def verdict(version: int, group: int) -> bool:
        digest = hashlib.sha256(f"{version}/{group}".encode()).digest()
        return digest[0] < 256 * share

    return verdict


def trained(rules: StepRules, verdict: Wants) -> Iterator[tuple[int, list[int]]]:
    """The definition, as a loop that samples one group after the other: version and groups of each
    step."""
    step = start = 0
    while True:
        version = max(0, step - rules.staleness)
        groups: list[int] = []
        looked_at = 0
        while len(groups) < rules.groups_per_step:
            if rules.is_filtered and looked_at == rules.max_rounds * rules.groups_per_step:
                break
            group = start + looked_at
            looked_at += 1
            if not rules.is_filtered or verdict(version, group):
                groups.append(group)
        yield version, groups
        start += looked_at
        step += 1


@dataclass
class World:
    """Workers that answer, fail, come and go at random, a judge that takes its time, and a trainer
    that is sometimes restarted."""

    rules: StepRules
    verdict: Wants
    rng: random.Random
    scheduler: Scheduler = field(init=False)
    running: list[tuple[str, Request]] = field(default_factory=list)  # also what no longer counts
    to_judge: list[tuple[int, int]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    num_workers: int = 0
    is_training: bool = False
    judges_slowly: bool = False

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.rules)

    def event(self) -> None:
        kinds = (
            [self.answer] * 40
            + [self.judge] * (4 if self.judges_slowly else 11)
            + [self.train] * 4
            + [self.switch] * 4
        )
        kinds += [self.join, self.leave, self.fail, self.restart, self.look_for_requests]
        self.rng.choice(kinds)()
        self.look()

    def look_for_requests(self) -> None:
        """Every request of an open batch is in one place, and there are no others."""
        scheduler = self.scheduler
        waiting = [request for heap in scheduler.queue._waiting.values() for request in heap]
        workers = scheduler.queue.workers.values()
        running = [request for worker in workers for request in worker.running]
        answered = [
            Request(batch.version, group, response)
            for batch in scheduler.end._batches
            for group in batch.groups
            for response in scheduler.end._answered.get(group, ())
        ]
        expected = [
            Request(batch.version, group, response)
            for batch in scheduler.end._batches
            for group in batch.groups
            for response in range(self.rules.responses_per_group)
        ]
        assert sorted([*waiting, *running, *answered]) == sorted(expected)

    def look(self) -> None:
        """Submits and aborts as told; nothing runs twice, nothing beyond a capacity."""
        for pair in self.scheduler.to_abort():
            assert pair in self.running
            if self.rng.random() < 0.7:  # else the answer is on its way already
                self.running.remove(pair)
        for worker, request in self.scheduler.assign():
            assert worker in self.versions
            assert self.versions[worker] >= request.version
            assert not self.rules.lockstep or self.versions[worker] == request.version
            self.running.append((worker, request))
        for worker in self.scheduler.queue.workers.values():
            assert len(worker.running) <= worker.capacity
        ages = [self.scheduler.version - batch.version for batch in self.scheduler.end._batches]
        assert all(age <= self.rules.staleness for age in ages)

    def join(self) -> None:
        if len(self.versions) < 5:
            self.num_workers += 1
            name = f"worker {self.num_workers}"
            # One that comes first takes weights that are wanted of it; the oldest are kept.
            version = min(self.scheduler.end.oldest_needed, self.scheduler.version)
            self.scheduler.queue.join(name, self.rng.randint(1, 6), version)
            self.versions[name] = version

    def leave(self) -> None:
        if self.versions and self.rng.random() < 0.5:
            name = self.rng.choice(sorted(self.versions))
            self.scheduler.queue.leave(name)
            del self.versions[name]

    def switch(self) -> None:
        for name, version in list(self.versions.items()):
            if version < self.scheduler.version and self.scheduler.may_switch(name):
                newer = version + 1 if self.rules.lockstep else self.scheduler.version
                self.scheduler.switch(name, newer)
                self.versions[name] = newer

    def answer(self) -> None:
        if self.running:
            worker, request = self.running.pop(self.rng.randrange(len(self.running)))
            if self.scheduler.finished(worker, request) and self.scheduler.end.is_whole(
                request.group
            ):
                self.to_judge.append((request.version, request.group))

    def fail(self) -> None:
        if self.running:
            self.scheduler.queue.fail(*self.running.pop(self.rng.randrange(len(self.running))))

    def judge(self) -> None:
        if self.to_judge:
            version, group = self.to_judge.pop(self.rng.randrange(len(self.to_judge)))
            wanted = not self.rules.is_filtered or self.verdict(version, group)
            self.scheduler.judged(version, group, wanted=wanted)

    def train(self) -> None:
        """Begins an update or ends it."""
        if self.is_training:
            self.scheduler.published(len(self.batches))
            self.is_training = False
        elif self.scheduler.is_ready:
            batch = self.scheduler.take()
            self.batches.append((self.rules.version_of(batch.step), list(batch.groups)))
            self.is_training = True

    def restart(self) -> None:
        """The trainer goes on from a checkpoint: workers have to come again."""
        settled = (
            self.scheduler.end.oldest_needed >= self.scheduler.version or not self.rules.lockstep
        )
        if not self.is_training and settled and self.rng.random() < 0.2:
            state = self.scheduler.state()
            self.scheduler = Scheduler.restored(self.rules, state)
            self.versions = {}
            self.to_judge = self.scheduler.end.to_judge()


@pytest.mark.parametrize("name", SETTINGS)
def test_random_events_train_what_a_plain_loop_trains(name: str) -> None:
    rules = SETTINGS[name]
    verdict = wants(0.4) if rules.lockstep else lambda version, group: wants(0.4)(0, group)
    num_steps = 0
    for seed in range(4):
        world = World(rules, verdict, random.Random(seed), judges_slowly=seed % 2 == 1)
        for _ in range(EVENTS // len(SETTINGS) // 4):
            world.event()
        expected = [pair for pair, _ in zip(trained(rules, verdict), world.batches, strict=False)]
        assert world.batches == expected
        num_steps += len(world.batches)
    assert num_steps > 40, "the events got nowhere"
