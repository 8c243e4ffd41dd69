"""Partial rollouts: levels and groups by hand, and after random events those of a plain
computation."""

import random

import pytest

from megatron_rl.scheduling.partial import PartialRules, PartialScheduler, PartialStep
from megatron_rl.scheduling.work import Request

RULES = PartialRules(groups_per_step=2, responses_per_group=2, groups_in_flight=3, max_age=1)
Lengths = dict[tuple[int, int], int]


def plain(rules: PartialRules, lengths: Lengths, num_steps: int) -> list[PartialStep]:
    """The definition: tokens that are left of each response, step by step."""
    left: dict[int, list[int]] = {}
    first_step: dict[int, int] = {}
    steps = []
    for step in range(num_steps):
        while len(left) < rules.groups_in_flight:
            number = len(first_step)
            left[number] = [lengths[number, each] for each in range(rules.responses_per_group)]
            first_step[number] = step
        levels = sorted(max(of_group) for of_group in left.values())
        oldest = [max(left[n]) for n in left if step - first_step[n] == rules.max_age]
        level = max(levels[rules.groups_per_step - 1], *oldest, 0)
        groups = sorted(n for n in left if max(left[n]) <= level)[: rules.groups_per_step]
        steps.append(PartialStep(step, groups, level, [first_step[n] for n in groups]))
        left = {
            n: [max(0, tokens - level) for tokens in of_group]
            for n, of_group in left.items()
            if n not in groups
        }
    return steps


def test_levels_by_hand() -> None:
    lengths: Lengths = {(0, 0): 9, (0, 1): 2, (1, 0): 4, (1, 1): 1, (2, 0): 3, (2, 1): 6}
    lengths |= {(3, 0): 1, (3, 1): 1, (4, 0): 2, (4, 1): 2, (5, 0): 1, (5, 1): 5}
    first, second = plain(RULES, lengths, 2)
    # Levels 9, 4, 6: at 6 two groups are whole. Group 0 has 3 tokens to go and is one step old, so
    # the next step ends no earlier, though groups 3 and 4 are whole at 1 and 2.
    assert (first.groups, first.level) == ([1, 2], 6)
    assert (second.groups, second.level, second.first_steps) == ([0, 3], 3, [0, 1])


class Fleet:
    """Workers whose responses get tokens at any pace, and stop at some time after the limit."""

    def __init__(self, rules: PartialRules, lengths: Lengths, seed: int) -> None:
        self.scheduler = PartialScheduler(rules)
        self.lengths = lengths
        self.rng = random.Random(seed)
        self.kept: Lengths = {}  # tokens of earlier steps
        self.running: dict[tuple[str, Request], int] = {}
        self.names: list[str] = []
        self.num_workers = 0
        self.steps: list[PartialStep] = []

    def event(self) -> None:
        choice = self.rng.random()
        if choice < 0.02 or not self.names:
            self.num_workers += 1
            self.names.append(f"worker {self.num_workers}")
            self.scheduler.queue.join(self.names[-1], self.rng.randint(1, 9), 10**9)
        elif choice < 0.03:
            gone = self.names.pop(self.rng.randrange(len(self.names)))
            self.scheduler.queue.leave(gone)
            self.running = {key: n for key, n in self.running.items() if key[0] != gone}
        for worker, request in self.scheduler.assign():
            self.running[worker, request] = 0
        if self.running:
            self._move(self.rng.choice(sorted(self.running)))
        if self.scheduler.is_ready:
            self._train()

    def _move(self, key: tuple[str, Request]) -> None:
        worker, request = key
        name = (request.group, request.response)
        left = self.lengths[name] - self.kept.get(name, 0)
        limit = self.scheduler.limit
        self.running[key] = min(left, self.running[key] + self.rng.randint(1, 9))
        if self.running[key] == left:
            assert self.scheduler.finished(worker, request, self.running.pop(key))
        elif limit is not None and self.running[key] >= limit:
            assert self.scheduler.paused(worker, request)
            del self.running[key]

    def _train(self) -> None:
        step = self.scheduler.take()
        self.steps.append(step)
        for number in range(self.scheduler._num_admitted):
            for response in range(self.scheduler.rules.responses_per_group):
                name = (number, response)
                if number not in step.groups and self.scheduler._num_admitted > number:
                    begun = number in self.scheduler._groups
                    is_new = begun and self.scheduler._groups[number].first_step > step.step
                    if begun and not is_new:
                        self.kept[name] = self.kept.get(name, 0) + step.level


@pytest.mark.parametrize(
    "rules",
    [RULES, PartialRules(5, 3, 7, 2), PartialRules(4, 2, 8, 3), PartialRules(3, 1, 3, 1)],
)
def test_random_events_end_steps_where_a_plain_computation_does(rules: PartialRules) -> None:
    draw = random.Random(3)
    names = [
        (group, number) for group in range(3000) for number in range(rules.responses_per_group)
    ]
    lengths = {name: int(draw.lognormvariate(2.5, 0.9)) + 1 for name in names}
    for seed in range(3):
        fleet = Fleet(rules, lengths, seed)
        for _ in range(8000):
            fleet.event()
        assert len(fleet.steps) > 20
        assert fleet.steps == plain(rules, lengths, len(fleet.steps))
        trained = [group for step in fleet.steps for group in step.groups]
        assert len(set(trained)) == len(trained)
        ages = [step.step - first for step in fleet.steps for first in step.first_steps]
        assert max(ages) <= rules.max_age
