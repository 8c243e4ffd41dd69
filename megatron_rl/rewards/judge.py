"""Judges one response inside a worker: the answer is cut out, verified, and the whole is matched
against the format, under a timer."""

from __future__ import annotations

import math
import random
import signal
import sys
import time
from types import FrameType
from typing import Any

import megatron_rl.rewards.builtin  # noqa: F401 (registers the package's own verifiers)
from megatron_rl.rewards.limits import limit_cpu_seconds, limit_processes_and_memory
from megatron_rl.rewards.messages import Setup, reason
from megatron_rl.rewards.patterns import compile_pattern
from megatron_rl.rewards.registry import verifier_class
from megatron_rl.rewards.verdict import Task, Verdict

AGAIN_S = 0.5  # the timer rings again for code that caught its first ring


class OutOfTime(BaseException):
    """Not an Exception: libraries catch those."""


class Judge:
    """The verifiers of one pool. Made in the server; ``judge`` runs in the workers forked from
    it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._verifiers = {name: verifier_class(name)(setup.options) for name in setup.verifiers}
        self._answer = (
            None if setup.answer_pattern is None else compile_pattern(setup.answer_pattern)
        )
        self._format = (
            None if setup.format_pattern is None else compile_pattern(setup.format_pattern)
        )
        self._alarm = Alarm(setup.options.timeout_s)
        self._limited = False
        self._cpu_limited_at = -math.inf
        for verifier in self._verifiers.values():
            verifier.prepare()

    def judge(self, name: str | None, task: Task, response: str) -> dict[str, Any]:
        """What is known after at most ``timeout_s``: ``accuracy`` and ``format`` in [0, 1],
        ``problem`` where something could not be judged (it counts 0), ``last`` where this process
        should judge no other: code was broken off in the middle, or the memory was full. ``name``
        None: only the format is wanted."""
        if not self._limited:
            self._limit()
        found: dict[str, Any] = {"accuracy": 0.0, "format": 0.0, "problem": None}
        # Once a second is enough, and costs less: the call takes longer than many verdicts.
        if time.monotonic() > self._cpu_limited_at + 1.0:
            self._cpu_limited_at = time.monotonic()
            limit_cpu_seconds(self._setup.options.timeout_s + 1.0)
        # A scorer that draws gives one response one verdict, whatever was judged before.
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        try:
            with self._alarm:
                self._fill(found, name, task, response)
        except OutOfTime:
            found["problem"] = (
                f"no verdict within reward.timeout_s = {self._setup.options.timeout_s:g} s"
            )
            found["last"] = True
        except MemoryError:
            found["problem"] = (
                "MemoryError: it wanted more than reward.memory_gib = "
                f"{self._setup.options.memory_bytes / 2**30:g} GiB"
            )
            found["last"] = True
        except Exception as error:  # noqa: BLE001 - verifiers raise anything; the reason is kept
            found["problem"] = reason(error)
        return found

    def _fill(self, found: dict[str, Any], name: str | None, task: Task, response: str) -> None:
        """Writes each result as soon as it is known, so that what comes later cannot lose it."""
        verdict = Verdict(0.0)
        if name is not None:
            answer = response if self._answer is None else self._answer.last_group(response)
            if answer is not None:
                verdict = self._verified(name, task, answer)
            found["accuracy"] = verdict.accuracy
        if self._format is not None:
            found["format"] = float(self._format.matches_all(response))
        found["problem"] = verdict.problem

    def _verified(self, name: str, task: Task, answer: str) -> Verdict:
        """The verdict; what the verifier raised is its problem, and the format is judged all the
        same."""
        try:
            return self._verifiers[name].verify(task, answer)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return Verdict(0.0, reason(error))

    def _limit(self) -> None:
        """Once, in the worker: the server must stay free to fork."""
        processes = any(verifier.starts_processes for verifier in self._verifiers.values())
        limit_processes_and_memory(self._setup.options, processes=processes)
        self._alarm.prepare()
        self._limited = True


class Alarm:
    """``with alarm:`` raises OutOfTime inside after ``seconds``, and again every half second should
    it be caught."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._armed = seconds, False

    def prepare(self) -> None:
        """Once in each process that uses it."""
        signal.signal(signal.SIGALRM, self._ring)

    def __enter__(self) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self._seconds, AGAIN_S)

    def __exit__(self, *raised: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise OutOfTime
