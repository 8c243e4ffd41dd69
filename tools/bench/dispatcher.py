"""How many events a second the dispatcher of rollouts takes, with replicas that are a formula.

    python tools/bench/dispatcher.py [--responses 8192] [--replicas 64 512]

A step of so many responses, eight to a prompt, is sampled by replicas that end theirs in random
order and at once: what is measured is rank 0's work alone, from the first request to the summary of
the step, without messages between ranks. Printed: events (ended, scored), seconds, and the share
of a step that takes ``--step-s``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl.config.method import load_method
from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.dispatcher import Dispatcher, Ended, Event, GenerationRequest, Scored
from megatron_rl.rollouts.jobs import TrainingJob
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.rollouts import step_rules
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.scheduling.scheduler import Scheduler
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Prompt, Sampling, Score, VersionSpan

PER_PROMPT = 8
STEPS = 5  # of which the median is printed


class Formula:
    """Implements ``GenerationBackend``: some of what runs ends between two turns."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.num_events = 0
        self._rng = random.Random(version)
        self._running: list[tuple[str, Request]] = []
        self._ended: list[Request] = []

    def submit(self, worker: str, wanted: GenerationRequest) -> None:
        self._running.append((worker, wanted.request))

    def abort(self, worker: str, request: Request) -> None:
        self._running.remove((worker, request))

    def pause(self, level: int) -> None:
        raise AssertionError("whole groups have no level")

    def events(self) -> list[Event]:
        events: list[Event] = [Scored(one, Score(1.0, one.response > 0)) for one in self._ended]
        self._ended = []
        for _ in range(min(64, len(self._running))):
            place = self._rng.randrange(len(self._running))
            self._running[place], self._running[-1] = self._running[-1], self._running[place]
            worker, request = self._running.pop()
            length = 1 + self._rng.randrange(8000)
            spans = (VersionSpan(self.version, length),)
            events.append(Ended(worker, request, length, False, spans))
            self._ended.append(request)
        self.num_events += len(events)
        return events

    def holder(self, worker: str | None, group: int) -> int:
        return 0


class NoRewards:
    """Scores come from the formula."""

    def give(self, *response: Any) -> None:
        raise AssertionError("no prompt brings responses along")


def one_step(num_replicas: int, num_responses: int, method: str) -> tuple[int, float]:
    """Events and seconds of a step."""
    num_prompts = num_responses // PER_PROMPT
    prompts = [Prompt(f"p{number}", (1, 2), "2", "toy") for number in range(4 * num_prompts)]
    chosen = load_method(method)
    job = TrainingJob(
        rules=step_rules(chosen, num_prompts, PER_PROMPT),
        stream=PromptStream(PromptLoader(prompts, seed=1, shuffle=True)),
        plan=SamplingPlan(Sampling(PER_PROMPT, 8000), 1),
        wants_group=chosen.wants_group,
        verdicts=VerdictRules(chosen.config.min_group, 0.0),
    )
    backend = Formula(0)
    scheduler = Scheduler(job.rules)
    for number in range(num_replicas):
        scheduler.join(f"{number:06d}", 1 + num_responses // num_replicas, 0)
    rewards: Any = NoRewards()
    dispatcher = Dispatcher(job, scheduler, backend, rewards)
    begin = time.perf_counter()
    while not dispatcher.is_ready:
        dispatcher.turn()
    dispatcher.take()
    return backend.num_events, time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--step-s", type=float, default=60.0, help="of which a share is printed")
    options = parser.parse_args(argv)
    for method in ("grpo", "dapo"):
        for num_replicas in options.replicas:
            found = [one_step(num_replicas, options.responses, method) for _ in range(STEPS)]
            num_events, seconds = sorted(found, key=lambda pair: pair[1])[STEPS // 2]
            share = seconds / options.step_s
            print(
                f"{method}, {num_replicas} replicas: {num_events} events in {seconds:.2f} s,"
                f" {num_events / seconds:.0f} a second, {share:.1%} of {options.step_s:g} s"
            )


if __name__ == "__main__":
    main()
