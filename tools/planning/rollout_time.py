"""How long engines generate and wait: the scheduler of a run at simulated engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.schema import PartialConfig, SourceConfig
from megatron_rl.scheduling.end_of_step import StepRules
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

_P99 = 2.3263478740408408  # standard deviations above the median of a normal distribution
_STEPS = 3  # of which the mean is taken where steps differ


@dataclass(frozen=True)
class Engines:
    """``number`` of them, each runs at most ``slots`` sequences at once."""

    number: int
    slots: int
    step: DecodeStep

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.number, self.step)


@dataclass(frozen=True)
class Lengths:
    """Implements ``simulated_rollouts.Content``: every step has the same ``[prompts, responses]``
    tokens, and all of them are wanted."""

    tokens: np.ndarray

    def length(self, request: Request) -> int:
        return int(self.tokens[request.group % len(self.tokens), request.response])

    def wants(self, group: int) -> bool:
        return True


def least_decode_step(
    weight_bytes: float, token_bytes: float, memory_gb_s: float, prompt_tokens: int
) -> DecodeStep:
    """From the bytes that an engine reads: ``weight_bytes`` once a step, ``token_bytes`` for every
    token that a running sequence has so far; ``memory_gb_s``: of the device. Kernels reach less
    than this speed."""
    rate = memory_gb_s * 1e9
    return DecodeStep(weight_bytes / rate, 0.0, token_bytes / rate, prompt_tokens)


def response_lengths(count: int, median: float, p99: float, limit: int) -> np.ndarray:
    """``count`` lengths in tokens, log-normal, cut at ``limit``; the same at every call."""
    spread = math.log(p99 / median) / _P99
    draws = np.random.default_rng(0).lognormal(math.log(median), spread, count)
    return np.clip(np.ceil(draws), 1, limit).astype(np.int64)


def one_step(tokens: np.ndarray, engines: Engines) -> Steady:
    """Of a step that begins with idle engines, until its last response: from one queue, response by
    response."""
    fleet = engines.fleet
    begin = Mark.of(fleet)
    scheduler = Scheduler(StepRules(*tokens.shape))
    Driver(fleet, scheduler, Lengths(tokens), engines.slots).take()
    return begin.until_now(fleet, 1)


def partial_step(tokens: np.ndarray, engines: Engines, partial: PartialConfig) -> Steady:
    """Of a step whose other responses continue in the next one."""
    assert partial.groups_in_flight is not None
    rules = StepRules(
        *tokens.shape, groups_in_flight=partial.groups_in_flight, max_age=partial.max_age
    )
    fleet = engines.fleet
    driver = PartialDriver(fleet, rules, Lengths(tokens), engines.slots)
    for _ in range(2 + partial.max_age):
        driver.step()
    begin = Mark.of(fleet)
    for _ in range(_STEPS):
        driver.step()
    return begin.until_now(fleet, _STEPS)


def step_beside_training(
    tokens: np.ndarray, engines: Engines, source: SourceConfig, update_s: float, push: Push
) -> Steady:
    """Of a step of a run whose engines sample while it trains for ``update_s`` and while they get
    new weights: ``seconds`` of all of it together."""
    rules = StepRules(
        *tokens.shape, staleness=source.staleness, lockstep=source.schedule == "lockstep"
    )
    driver = Driver(engines.fleet, Scheduler(rules), Lengths(tokens), engines.slots)
    return beside_training(driver, update_s, push, _STEPS, first_steps=2 + source.staleness)
