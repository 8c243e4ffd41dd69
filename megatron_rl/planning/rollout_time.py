"""How long the engines of a step generate, and how long they wait for the longest answer."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_P99 = 2.3263478740408408  # standard deviations above the median of a normal distribution


@dataclass(frozen=True)
class DecodeStep:
    """Least seconds of one decoding step of a rank, from the bytes that it reads.

    ``weight_bytes`` once a step, ``token_bytes`` for every token that a running sequence has so
    far; ``memory_gb_s``: of the device. Kernels reach less than this speed.
    """

    weight_bytes: float
    token_bytes: float
    memory_gb_s: float

    def seconds(self, context_tokens: float) -> float:
        """``context_tokens``: of all running sequences together."""
        return (self.weight_bytes + self.token_bytes * context_tokens) / (self.memory_gb_s * 1e9)


@dataclass(frozen=True)
class Rollout:
    """``seconds``: until the last response of the last engine. ``idle``: share of the engines'
    time in which they have nothing left to do."""

    seconds: float
    idle: float


def response_lengths(count: int, median: float, p99: float, limit: int) -> np.ndarray:
    """``count`` lengths in tokens, log-normal, cut at ``limit``; the same at every call."""
    spread = math.log(p99 / median) / _P99
    draws = np.random.default_rng(0).lognormal(math.log(median), spread, count)
    return np.clip(np.ceil(draws), 1, limit).astype(np.int64)


def rollout_time(
    groups: Sequence[Sequence[int]], num_engines: int, slots: int, step: DecodeStep, prompt: int
) -> Rollout:
    """Prompts are dealt out in equal runs, as the trainer does; no engine helps another.

    Args:
        groups: lengths of the responses to each prompt.
        slots: sequences that an engine runs at once.
        prompt: tokens of a prompt.
    """
    shares = np.array_split(np.arange(len(groups)), num_engines)
    busy = []
    for share in shares:
        lengths: list[int] = []
        for group in share:
            lengths += groups[group]
        busy.append(engine_seconds(lengths, slots, step, prompt))
    longest = max(busy)
    if longest == 0:
        return Rollout(longest, idle=0.0)
    return Rollout(longest, idle=1 - sum(busy) / (num_engines * longest))


def engine_seconds(lengths: Sequence[int], slots: int, step: DecodeStep, prompt: int) -> float:
    """Of one engine that starts its sequences in order, a new one as soon as another ends.

    Decoding steps are taken together from one end to the next: with ``n`` sequences of ``c`` tokens
    in all, ``k`` steps read the weights ``k`` times and ``k c + n k (k - 1) / 2`` tokens.
    """
    waiting = list(reversed(lengths))  # the next one is the last, which ``pop`` takes
    running: list[tuple[int, int]] = []  # the step at which a sequence ends, its length
    now = 0
    context = 0.0
    seconds = 0.0
    token_seconds = step.seconds(1.0) - step.seconds(0.0)
    while waiting or running:
        while waiting and len(running) < slots:
            length = waiting.pop()
            heapq.heappush(running, (now + length, length))
            context += prompt
        # Until the next one ends: ``n`` sequences run all the while.
        steps = running[0][0] - now
        tokens = steps * context + len(running) * steps * (steps - 1) / 2
        seconds += steps * step.seconds(0.0) + tokens * token_seconds
        context += len(running) * steps
        now += steps
        while running and running[0][0] == now:
            context -= prompt + heapq.heappop(running)[1]
    return seconds
