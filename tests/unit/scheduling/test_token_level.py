"""Partial rollouts: levels and groups by hand, and after random events those of a plain
computation."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from megatron_rl.scheduling.end_of_step import StepGroups, StepRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request

RULES = StepRules(groups_per_step=2, responses_per_group=2, groups_in_flight=3, max_age=1)
FILTERED = replace(RULES, max_rounds=3)
Lengths = dict[tuple[int, int], int]
Wants = Callable[[int], bool]


@dataclass
class Begun:
    """A group in a slot of a step of the plain computation."""

    number: int
    begin: int
    end: int


class Plain:
    """The definition: tokens that are left of each response, slot after slot."""

    def __init__(self, rules: StepRules, lengths: Lengths, wants: Wants) -> None:
        self.rules, self.lengths, self.wants = rules, lengths, wants
        self.left: dict[int, list[int]] = {}  # of the open groups
        self.first_step: dict[int, int] = {}
        self.unused = list(range(len(lengths) // rules.responses_per_group))

    def slots(self) -> list[list[Begun]]:
        """Every slot to its end, whatever the level is."""
        rules = self.rules
        num_new = rules.groups_in_flight - len(self.left)
        firsts = sorted([*self.left, *self.unused[:num_new]])
        slots = []
        for slot, number in enumerate(firsts):
            of_slot = [self.begun(number, 0)]
            while not self.wants(of_slot[-1].number) and len(of_slot) < (rules.max_rounds or 1):
                place = num_new + (len(of_slot) - 1) * rules.groups_in_flight + slot
                of_slot.append(self.begun(self.unused[place], of_slot[-1].end))
            slots.append(of_slot)
        return slots

    def begun(self, number: int, begin: int) -> Begun:
        return Begun(number, begin, begin + max(self.left_of(number)))

    def left_of(self, number: int) -> list[int]:
        count = self.rules.responses_per_group
        return self.left.get(number, [self.lengths[number, each] for each in range(count)])

    def step(self, step: int) -> tuple[list[int], list[int], int]:
        """Groups that are trained, those that are refused, and the level."""
        slots = self.slots()
        every = [group for slot in slots for group in slot]
        wanted = sorted(group.end for group in every if self.wants(group.number))
        oldest = [
            slot[0].end
            for slot in slots
            if step - self.first_step.get(slot[0].number, step) == self.rules.max_age
        ]
        level = max(group.end for group in every)
        if len(wanted) >= self.rules.groups_per_step:
            level = max(wanted[self.rules.groups_per_step - 1], *oldest, 0)
        there = [
            group for slot in slots for group in slot if group in slot[:1] or group.begin < level
        ]
        begun = sorted((self.first_step.get(group.number, step), group.number) for group in there)
        ends = {group.number: group.end for group in there}
        passed = [number for _, number in begun if ends[number] <= level]
        trained = [number for number in passed if self.wants(number)][: self.rules.groups_per_step]
        refused = [number for number in passed if not self.wants(number)]
        for group in there:
            self.first_step.setdefault(group.number, step)
            passed_tokens = level - group.begin
            left = [max(0, each - passed_tokens) for each in self.left_of(group.number)]
            self.left[group.number] = left
        self.unused = [number for number in self.unused if number not in self.first_step]
        for number in (*trained, *refused):
            del self.left[number]
        return trained, refused, level


def test_levels_by_hand() -> None:
    lengths: Lengths = {(0, 0): 9, (0, 1): 2, (1, 0): 4, (1, 1): 1, (2, 0): 3, (2, 1): 6}
    lengths |= {(3, 0): 1, (3, 1): 1, (4, 0): 2, (4, 1): 2, (5, 0): 1, (5, 1): 5}
    plain = Plain(RULES, lengths, lambda number: True)
    # Levels 9, 4, 6: at 6 two groups are whole. Group 0 has 3 tokens to go and is one step old, so
    # the next step ends no earlier, though groups 3 and 4 are whole at 1 and 2.
    assert plain.step(0) == ([1, 2], [], 6)
    assert plain.step(1) == ([0, 3], [], 3)


def test_a_refused_group_is_replaced_where_it_has_ended() -> None:
    """Slots 0 to 2 begin with groups 0 to 2, which end at 9, 4 and 6. Group 1 is refused at 4, and
    group 4 (the slot's place behind group 3, which slot 0 may take) begins there: 4 + 2 = 6."""
    lengths: Lengths = {(0, 0): 9, (0, 1): 2, (1, 0): 4, (1, 1): 1, (2, 0): 3, (2, 1): 6}
    lengths |= {(3, 0): 1, (3, 1): 1, (4, 0): 2, (4, 1): 2, (5, 0): 1, (5, 1): 5}
    lengths |= {(number, response): 1 for number in range(6, 20) for response in range(2)}
    plain = Plain(FILTERED, lengths, lambda number: number != 1)
    assert plain.step(0) == ([2, 4], [1], 6)
    assert sorted(plain.slots()[1][0].__dict__.items())[2] == ("number", 3), "left out, now first"


class Fleet:
    """Workers whose responses get tokens at any pace, and stop at some time after the limit; a
    judge who takes its time; a trainer that is restarted between two steps."""

    def __init__(self, rules: StepRules, lengths: Lengths, wants: Wants, seed: int) -> None:
        self.scheduler = Scheduler(rules)
        self.lengths, self.wants = lengths, wants
        self.rng = random.Random(seed)
        self.kept: Lengths = {}  # tokens of earlier steps
        self.running: dict[tuple[str, Request], int] = {}
        self.names: list[str] = []
        self.num_workers = 0
        self.steps: list[StepGroups] = []

    def event(self) -> None:
        scheduler = self.scheduler
        choice = self.rng.random()
        if choice < 0.02 or not self.names:
            self.num_workers += 1
            self.names.append(f"worker {self.num_workers}")
            scheduler.queue.join(self.names[-1], self.rng.randint(1, 9), scheduler.version)
        elif choice < 0.03:
            gone = self.names.pop(self.rng.randrange(len(self.names)))
            scheduler.queue.leave(gone)
            self.running = {key: n for key, n in self.running.items() if key[0] != gone}
        for pair in scheduler.to_abort():
            self.running.pop(pair, None)  # its worker may have left
        for worker, request in scheduler.assign():
            self.running[worker, request] = 0
        to_judge = scheduler.end.to_judge()
        if to_judge and self.rng.random() < 0.3:
            version, group = self.rng.choice(to_judge)
            scheduler.judged(version, group, wanted=self.wants(group))
        elif self.running:
            self._move(self.rng.choice(sorted(self.running)))
        if scheduler.is_ready:
            self._train()

    def _move(self, key: tuple[str, Request]) -> None:
        worker, request = key
        name = (request.group, request.response)
        left = self.lengths[name] - self.kept.get(name, 0)
        limit = self.scheduler.limit(request.group)
        self.running[key] = min(left, self.running[key] + self.rng.randint(1, 9))
        if self.running[key] == left:
            assert self.scheduler.finished(worker, request, self.running.pop(key))
        elif limit is not None and self.running[key] >= limit:
            assert self.scheduler.paused(worker, request)
            del self.running[key]

    def _train(self) -> None:
        step = self.scheduler.take()
        self.steps.append(step)
        for number, limit in step.limits.items():
            for response in range(self.scheduler.rules.responses_per_group):
                name = (number, response)
                self.kept[name] = min(self.lengths[name], self.kept.get(name, 0) + limit)
        if self.rng.random() < 0.3:
            self.scheduler = Scheduler.restored(self.scheduler.rules, self.scheduler.state())
            self.names = []
            self.running = {}
        self.scheduler.published(step.step + 1)
        for name in self.names:
            self.scheduler.switch(name, step.step + 1)


@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        StepRules(5, 3, groups_in_flight=7, max_age=2),
        StepRules(4, 2, groups_in_flight=8, max_age=3),
        StepRules(3, 1, groups_in_flight=3, max_age=1),
        FILTERED,
        StepRules(5, 3, groups_in_flight=7, max_age=2, max_rounds=4),
        StepRules(4, 2, groups_in_flight=8, max_age=3, max_rounds=1),
        StepRules(3, 1, groups_in_flight=3, max_age=1, max_rounds=9),
    ],
)
def test_random_events_end_steps_where_a_plain_computation_does(rules: StepRules) -> None:
    draw = random.Random(3)
    names = [
        (group, number) for group in range(4000) for number in range(rules.responses_per_group)
    ]
    lengths = {name: int(draw.lognormvariate(2.5, 0.9)) + 1 for name in names}
    refused = {number for number in range(4000) if draw.random() < 0.5}

    def wants(number: int) -> bool:
        return not rules.is_filtered or number not in refused

    for seed in range(3):
        fleet = Fleet(rules, lengths, wants, seed)
        for _ in range(8000):
            fleet.event()
        assert len(fleet.steps) > 20
        plain = Plain(rules, lengths, wants)
        for number, step in enumerate(fleet.steps):
            assert (step.groups, step.refused, step.level) == plain.step(number)
            ages = [number - first for first in step.first_steps]
            assert max(ages, default=0) <= rules.max_age
        trained = [group for step in fleet.steps for group in step.groups]
        assert len(set(trained)) == len(trained)
        if rules.is_filtered:
            assert sum(len(step.refused) for step in fleet.steps) > 20
