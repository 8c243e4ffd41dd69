"""How long rollouts take, by schedule: ``megatron_rl.scheduling`` drives simulated replicas.

    python tools/bench/rollout_schedule.py [--steps 6]

Nothing is sampled: replicas are a formula (``simulated_fleet.py``), lengths are drawn, and
the scheduler is the one of a run. A decoding step takes 7 ms, 0.02 ms a sequence and 17 ns a token
in the cache: about a 7B model in bfloat16 on one GPU of the H100 class. Prompts cost nothing.
Lengths as in reasoning: prompts are hard or not, 4 % of responses reach the limit of 32,768 tokens.
A group is wanted with a given probability, independently. Three tables, each with the speed against
its first column:

One step: 128 prompts x 8, all wanted. "Shares of prompts" is the schedule that this project had
before: a contiguous share of the prompts for each replica. "Partial": responses go on in the next
step, see ``megatron_rl/scheduling/partial.py``; means of as many steps behind the first five.

Dynamic sampling: 128 wanted groups of 8. "Rounds" is what this project had before: what is missing
is sampled anew when all of a round is there.

Steps behind: 64 x 8 on 16 or 64 servers of one replica each, an update of 60 s beside them; step s
is of version max(0, s - k). As in a run, new weights reach the hosts of all servers in 3 s, while
they sample; each server goes over to them, in 1 s, when it has done what is wanted of the old ones;
and no more than two versions are in use. "Free": at once, and what runs goes on.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_model import table

from megatron_rl.scheduling.batches import KeptShare, Rules
from megatron_rl.scheduling.partial import PartialRules
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from tools.planning.simulated_fleet import DecodeStep, Fleet
from tools.planning.simulated_rollouts import (
    Driver,
    Mark,
    PartialDriver,
    Push,
    Steady,
    beside_training,
)

DECODE = DecodeStep(7e-3, sequence_s=2e-5, token_s=17e-9, resumed_s=1 / 20_000)
RESPONSES = 8
LIMIT = 32768
CAPACITY = 256
Row = dict[str, object]
UPDATE_S = 60.0
PUSH = Push(sync_s=3.0, switch_s=1.0)


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


def one_step(fleet: Fleet, content: Content, rules: Rules, kept_share: KeptShare) -> float:
    """Drives the scheduler through one step; the share of sampled tokens that it does not train."""
    groups = Driver(fleet, Scheduler(rules, kept_share=kept_share), content, CAPACITY).take()
    used = sum(int(content.lengths[group % len(content.lengths)].sum()) for group in groups)
    fleet.idle_share()
    return 1 - used / fleet.num_tokens()


def steps_behind(staleness: int, num_steps: int, num_replicas: int, *, lockstep: bool) -> Steady:
    """Of ``num_steps``, behind those in which the run gets into its stride."""
    first_steps = 3
    rules = Rules(
        groups_per_step=64,
        responses_per_group=RESPONSES,
        staleness=staleness,
        lockstep=lockstep,
    )
    content = Content.drawn(1, 64 * (first_steps + num_steps + staleness + 1))
    driver = Driver(Fleet(num_replicas, DECODE), Scheduler(rules), content, CAPACITY)
    return beside_training(driver, UPDATE_S, PUSH, num_steps, first_steps)


def partial_step(num_replicas: int, in_flight: int, num_steps: int) -> tuple[float, ...]:
    """Of a step, without the first ones: mean seconds, idle share, share of groups that were begun
    in an earlier step, largest age."""
    first_steps = 5
    fleet = Fleet(num_replicas, DECODE)
    content = Content.drawn(7, in_flight + 128 * (num_steps + first_steps))
    rules = PartialRules(128, RESPONSES, in_flight, max_age=3)
    driver = PartialDriver(fleet, rules, content, CAPACITY)
    for _ in range(first_steps):
        driver.step()
    begin = Mark.of(fleet)
    steps = [driver.step() for _ in range(num_steps)]
    found = begin.until_now(fleet, num_steps)
    old = sum(num for num, _ in steps) / (128 * num_steps)
    return found.seconds, found.idle, old, max(age for _, age in steps)


def mean(runs: int, run: Callable[[int], tuple[float, ...]]) -> list[float]:
    """Of what ``run`` gives for each seed."""
    return np.mean([run(seed) for seed in range(runs)], axis=0).tolist()


def plain_rows(runs: int) -> list[Row]:
    rows = []
    for num_replicas in (16, 64, 128, 256, 512):

        def shares(seed: int, num: int = num_replicas) -> tuple[float, ...]:
            fleet = Fleet(num, DECODE)
            by_shares(fleet, Content.drawn(1000 + seed, 128), range(128))
            return fleet.now_s, fleet.idle_share()

        def queue(seed: int, num: int = num_replicas) -> tuple[float, ...]:
            fleet = Fleet(num, DECODE)
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
                fleet = Fleet(num, DECODE)
                in_rounds(fleet, Content.drawn(50 + seed, 3000, kept), 128)
                return fleet.now_s, fleet.idle_share()

            def queue(seed: int, num: int = num_replicas, kept: float = kept) -> tuple[float, ...]:
                fleet = Fleet(num, DECODE)
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
        in_turns_s = steps_behind(0, num_steps, num_replicas, lockstep=True).seconds
        for schedule in ("lockstep", "free"):
            cells: Row = {"replicas": num_replicas, "schedule": schedule}
            for staleness in (0, 1, 2):
                is_lockstep = schedule == "lockstep"
                step = steps_behind(staleness, num_steps, num_replicas, lockstep=is_lockstep)
                cells[f"k = {staleness}"] = (
                    f"{step.seconds:.0f} s, {step.idle:.0%}, {in_turns_s / step.seconds:.2f}x"
                )
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
    print("\nSteps behind (k): seconds of a step, share without a sequence, speed\n")
    print(table(behind_rows(2 * runs)))


if __name__ == "__main__":
    main()
