"""How long rollouts take, by schedule: ``megatron_rl.scheduling`` drives simulated replicas.

    python tools/bench/rollout_schedule.py [--steps 6]

Nothing is sampled: replicas are a formula (``simulated_fleet.py``), lengths are drawn, and the
scheduler is the one of a run. Lengths as in reasoning: prompts are hard or not, 4 % of responses
reach the limit of 32,768 tokens. A group is wanted with a given probability, independently. Three
tables, each with the speed against its first column:

One step: 128 prompts x 8, all wanted. "Shares of prompts" is the schedule that this project had
before: a contiguous share of the prompts for each replica. "Partial": responses go on in the next
step, see ``megatron_rl/scheduling/partial.py``; means of as many steps behind the first five.

Dynamic sampling: 128 wanted groups of 8. "Rounds" is what this project had before: what is missing
is sampled anew when all of a round is there.

Steps behind: 64 x 8 on 16 replicas of their own, an update of 60 s and a sync of 3 s beside them;
step s is of version max(0, s - k), each replica changes its weights when it has nothing left to do
with the old ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gpu_model import table
from simulated_fleet import Fleet

from megatron_rl.scheduling.batches import KeptShare, Rules
from megatron_rl.scheduling.partial import PartialRules, PartialScheduler
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request

RESPONSES = 8
LIMIT = 32768
CAPACITY = 256
Row = dict[str, object]
UPDATE_S = 60.0
SYNC_S = 3.0


@dataclass(frozen=True)
class Content:
    """What would be sampled: a length for each response, whether each group is wanted."""

    lengths: np.ndarray  # [groups, responses]
    wanted: np.ndarray  # [groups]

    @classmethod
    def drawn(cls, seed: int, num_groups: int, kept: float = 1.0) -> Content:
        rng = np.random.default_rng(seed)
        hard = rng.random((num_groups, 1)) < 0.25
        size = (num_groups, RESPONSES)
        spread = np.exp(rng.normal(0, 0.35, (num_groups, 1)) + rng.normal(0, 0.45, size))
        lengths = np.where(hard, 7000, 2200) * spread
        at_limit = rng.random(size) < np.where(hard, 0.12, 0.013)
        lengths = np.clip(np.where(at_limit, LIMIT, lengths), 16, LIMIT).astype(int)
        return cls(lengths, rng.random(num_groups) < kept)

    def length(self, request: Request) -> int:
        return int(self.lengths[request.group % len(self.lengths), request.response])

    def wants(self, group: int) -> bool:
        return bool(self.wanted[group % len(self.wanted)])


def by_shares(fleet: Fleet, content: Content, groups: Sequence[int]) -> None:
    """All of these groups, contiguous shares of them for the replicas, to the last response."""
    num = len(fleet.replicas)
    for replica in range(num):
        share = groups[len(groups) * replica // num : len(groups) * (replica + 1) // num]
        requests = [Request(0, group, number) for group in share for number in range(RESPONSES)]
        fleet.begin(replica, {request: content.length(request) for request in requests})
    while fleet.next_moment() < math.inf:
        fleet.next_end()


def in_rounds(fleet: Fleet, content: Content, num_wanted: int) -> None:
    """Rounds of what is missing."""
    first = kept = 0
    while kept < num_wanted:
        groups = range(first, first + num_wanted - kept)
        by_shares(fleet, content, groups)
        kept += sum(map(content.wants, groups))
        first = groups.stop


class Driver:
    """The scheduler of a run, at the replicas of a fleet."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, content: Content) -> None:
        self.fleet = fleet
        self.scheduler = scheduler
        self.content = content
        self.versions = [scheduler.version] * len(fleet.replicas)
        for number in range(len(fleet.replicas)):
            scheduler.join(_name(number), CAPACITY, scheduler.version)

    def hand_out(self) -> None:
        aborts: dict[int, list[Request]] = {}
        for worker, request in self.scheduler.to_abort():
            aborts.setdefault(int(worker), []).append(request)
        for number, requests in aborts.items():
            self.fleet.abort(number, requests)
        self._switch()
        work: dict[int, dict[Request, int]] = {}
        for worker, request in self.scheduler.assign():
            work.setdefault(int(worker), {})[request] = self.content.length(request)
        for number, lengths in work.items():
            self.fleet.begin(number, lengths)

    def _switch(self) -> None:
        for number, version in enumerate(self.versions):
            if version < self.scheduler.version and self.scheduler.may_switch(_name(number)):
                self.versions[number] += 1  # each version has its batches
                self.scheduler.switch(_name(number), self.versions[number])

    def next_end(self) -> None:
        number, request = self.fleet.next_end()
        assert self.scheduler.finished(_name(number), request)
        if self.scheduler.is_whole(request.group):
            wanted = self.content.wants(request.group)
            self.scheduler.judged(request.version, request.group, wanted=wanted)
        self.hand_out()


def _name(number: int) -> str:
    return f"{number:06d}"


def one_step(fleet: Fleet, content: Content, rules: Rules, kept_share: KeptShare) -> float:
    """Drives the scheduler through one step; the share of sampled tokens that it does not train."""
    driver = Driver(fleet, Scheduler(rules, kept_share=kept_share), content)
    driver.hand_out()
    while not driver.scheduler.is_ready:
        driver.next_end()
    groups = driver.scheduler.take().groups
    used = sum(int(content.lengths[group % len(content.lengths)].sum()) for group in groups)
    fleet.idle_share()
    return 1 - used / fleet.num_tokens()


def steps_behind(staleness: int, num_steps: int, num_replicas: int) -> tuple[float, float]:
    """Mean seconds of a step and the idle share, without the first steps."""
    rules = Rules(groups_per_step=64, responses_per_group=RESPONSES, staleness=staleness)
    content = Content.drawn(1, 64 * (num_steps + staleness + 1))
    driver = Driver(Fleet(num_replicas), Scheduler(rules), content)
    published = math.inf  # when the update that runs is published
    ends: list[float] = []
    driver.hand_out()
    while len(ends) < num_steps:
        if driver.scheduler.is_ready and published == math.inf:
            driver.scheduler.take()
            published = driver.fleet.now_s + UPDATE_S + SYNC_S
        elif driver.fleet.next_moment() <= published:
            driver.next_end()
        else:
            driver.fleet.wait_until(published)
            ends.append(published)
            published = math.inf
            driver.scheduler.published(len(ends))
            driver.hand_out()
    return float(np.diff(ends)[2:].mean()), driver.fleet.idle_share()


class PartialDriver:
    """The same for partial rollouts. ``left``: tokens that a response still takes; ``there``: those
    of earlier steps."""

    def __init__(self, fleet: Fleet, rules: PartialRules, content: Content) -> None:
        self.fleet = fleet
        self.scheduler = PartialScheduler(rules)
        self.content = content
        self.there: dict[tuple[int, int], int] = {}
        self.limit = math.inf
        for number in range(len(fleet.replicas)):
            self.scheduler.queue.join(_name(number), CAPACITY, 10**9)

    def left(self, request: Request) -> int:
        there = self.there.get((request.group, request.response), 0)
        return self.content.length(request) - there

    def hand_out(self) -> None:
        work: dict[int, dict[Request, tuple[int, int]]] = {}
        for worker, request in self.scheduler.assign():
            there = self.there.get((request.group, request.response), 0)
            num_tokens = int(min(self.left(request), self.limit))
            work.setdefault(int(worker), {})[request] = (there, num_tokens)
        for number, responses in work.items():
            self.fleet.resume(number, responses)

    def next_end(self) -> None:
        number, request = self.fleet.next_end()
        if self.left(request) <= self.limit:
            self.scheduler.finished(_name(number), request, self.left(request))
        else:
            self.scheduler.paused(_name(number), request)
        limit = self.scheduler.limit
        if limit is not None and limit < self.limit:
            self.limit = limit
            self.fleet.limit(limit)
        self.hand_out()

    def step(self) -> tuple[int, int]:
        """Drives one step; responses that were begun before it, and the age of the oldest group."""
        self.limit = math.inf
        self.hand_out()
        while not self.scheduler.is_ready:
            self.next_end()
        taken = self.scheduler.take()
        for number, group in self.scheduler._groups.items():
            if group.first_step <= taken.step:
                for response in range(RESPONSES):
                    name = (number, response)
                    length = self.content.length(Request(0, *name))
                    self.there[name] = min(length, self.there.get(name, 0) + taken.level)
        num_old = sum(first < taken.step for first in taken.first_steps)
        return num_old, taken.step - min(taken.first_steps)


def partial_step(num_replicas: int, in_flight: int, num_steps: int) -> tuple[float, ...]:
    """Of a step, without the first ones: mean seconds, idle share, share of groups that were begun
    in an earlier step, largest age."""
    first_steps = 5
    fleet = Fleet(num_replicas)
    content = Content.drawn(7, in_flight + 128 * (num_steps + first_steps))
    driver = PartialDriver(fleet, PartialRules(128, RESPONSES, in_flight, max_age=3), content)
    for _ in range(first_steps):
        driver.step()
    begin_s = fleet.now_s
    idle_s = fleet.idle_share() * begin_s
    steps = [driver.step() for _ in range(num_steps)]
    seconds = fleet.now_s - begin_s
    idle = (fleet.idle_share() * fleet.now_s - idle_s) / seconds
    old = sum(num for num, _ in steps) / (128 * num_steps)
    return seconds / num_steps, idle, old, max(age for _, age in steps)


def mean(runs: int, run: Callable[[int], tuple[float, ...]]) -> list[float]:
    """Of what ``run`` gives for each seed."""
    return np.mean([run(seed) for seed in range(runs)], axis=0).tolist()


def plain_rows(runs: int) -> list[Row]:
    rows = []
    for num_replicas in (16, 64, 128, 256, 512):

        def shares(seed: int, num: int = num_replicas) -> tuple[float, ...]:
            fleet = Fleet(num)
            by_shares(fleet, Content.drawn(1000 + seed, 128), range(128))
            return fleet.now_s, fleet.idle_share()

        def queue(seed: int, num: int = num_replicas) -> tuple[float, ...]:
            fleet = Fleet(num)
            one_step(fleet, Content.drawn(1000 + seed, 128), Rules(128, RESPONSES), KeptShare())
            return fleet.now_s, fleet.idle_share()

        before_s, before_idle = mean(runs, shares)
        now_s, now_idle = mean(runs, queue)
        partial_cells = {}
        for in_flight in (160, 192, 256):
            step_s, idle, old, age = partial_step(num_replicas, in_flight, runs)
            partial_cells[f"partial, {in_flight} groups in flight"] = (
                f"{step_s:.0f} s, {idle:.0%}, {before_s / step_s:.2f}x; {old:.0%} begun before,"
                f" age {age:.0f}"
            )
        rows.append(
            {
                "replicas": num_replicas,
                "shares of prompts": f"{before_s:.0f} s, {before_idle:.0%}",
                "queue of responses": f"{now_s:.0f} s, {now_idle:.0%}, {before_s / now_s:.2f}x",
                **partial_cells,
            }
        )
    return rows


def filtered_rows(runs: int) -> list[Row]:
    rows = []
    for kept in (0.7, 0.5, 0.3):
        for num_replicas in (16, 64, 128):

            def rounds(seed: int, num: int = num_replicas, kept: float = kept) -> tuple[float, ...]:
                fleet = Fleet(num)
                in_rounds(fleet, Content.drawn(50 + seed, 3000, kept), 128)
                return fleet.now_s, fleet.idle_share()

            def queue(seed: int, num: int = num_replicas, kept: float = kept) -> tuple[float, ...]:
                fleet = Fleet(num)
                known = KeptShare(wanted=128, seen=128 / kept)
                rules = Rules(128, RESPONSES, max_groups=3000)
                unused = one_step(fleet, Content.drawn(50 + seed, 3000, kept), rules, known)
                return fleet.now_s, fleet.idle_share(), unused

            before_s, before_idle = mean(runs, rounds)
            now_s, now_idle, unused = mean(runs, queue)
            rows.append(
                {
                    "kept": kept,
                    "replicas": num_replicas,
                    "rounds": f"{before_s:.0f} s, {before_idle:.0%}",
                    "sampled ahead": f"{now_s:.0f} s, {now_idle:.0%}, {before_s / now_s:.2f}x",
                    "refused": f"{1 - kept:.0%}",
                    "tokens not trained": f"{unused:.0%}",
                }
            )
    return rows


def behind_rows(num_steps: int) -> list[Row]:
    rows = []
    for num_replicas in (16, 64):
        cells: Row = {"replicas": num_replicas}
        first_s = 0.0
        for staleness in (0, 1, 2):
            step_s, idle = steps_behind(staleness, num_steps, num_replicas)
            first_s = first_s or step_s
            cells[f"k = {staleness}"] = f"{step_s:.0f} s, {idle:.0%}, {first_s / step_s:.2f}x"
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=6, help="seeds a row; steps of a run")
    runs = parser.parse_args().steps
    print("\nOne step: seconds, share of time without a sequence, speed\n")
    print(table(plain_rows(runs)), flush=True)
    print("\nDynamic sampling: the same; shares of refused groups and of tokens not trained\n")
    print(table(filtered_rows(runs)), flush=True)
    print("\nSteps behind (k), in lockstep: seconds of a step, share without a sequence, speed\n")
    print(table(behind_rows(3 + 2 * runs)))


if __name__ == "__main__":
    main()
