"""How long engines generate and wait: the dispatcher of a run at simulated engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.schema import PartialConfig, SourceConfig
from megatron_rl.scheduling.end_of_step import StepRules
from tools.planning.simulated_fleet import DecodeStep, Fleet
from tools.planning.simulated_rollouts import Push, SimulatedRun, Steady, in_the_mean

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
    return _steps(tokens, engines, StepRules(*tokens.shape), first_steps=0, num_steps=1)


def partial_step(tokens: np.ndarray, engines: Engines, partial: PartialConfig) -> Steady:
    """Of a step whose other responses continue in the next one."""
    in_flight, max_age = partial.groups_in_flight, partial.max_age
    rules = StepRules(*tokens.shape, groups_in_flight=in_flight, max_age=max_age)
    return _steps(tokens, engines, rules, first_steps=2 + max_age)


def step_beside_training(
    tokens: np.ndarray, engines: Engines, source: SourceConfig, update_s: float, push: Push
) -> Steady:
    """Of a step of a run whose engines sample while it trains for ``update_s`` and while they get
    new weights: ``seconds`` of all of it together."""
    lockstep = source.schedule == "lockstep"
    rules = StepRules(*tokens.shape, staleness=source.staleness, lockstep=lockstep)
    run = SimulatedRun(engines.fleet, rules, tokens, engines.slots)
    return in_the_mean(run, 2 + source.staleness, _STEPS, update_s, push)


def _steps(
    tokens: np.ndarray,
    engines: Engines,
    rules: StepRules,
    first_steps: int,
    num_steps: int = _STEPS,
) -> Steady:
    run = SimulatedRun(engines.fleet, rules, tokens, engines.slots)
    return in_the_mean(run, first_steps, num_steps)
