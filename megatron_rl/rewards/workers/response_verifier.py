"""Judges responses inside a worker, each under a timer.

The answer is cut out of the response and verified; the format is matched against all of it.
"""

import math
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import megatron_rl.rewards.builtin  # noqa: F401 (registers the package's own verifiers)
from megatron_rl.rewards.base import Task, Verdict
from megatron_rl.rewards.patterns import ResponsePattern
from megatron_rl.rewards.registry import verifier_class
from megatron_rl.rewards.workers.messages import WorkerSetup, reason

# A longer response is not judged, as a part of it could have another answer.
_MAX_RESPONSE_CHARACTERS = 1_000_000
_AGAIN_S = 0.5  # the timer rings again for code that caught its first ring


class OutOfTimeError(BaseException):
    """Not an Exception, because libraries catch those."""


class ResponseVerifier:
    """The verifiers of one pool.

    Made in the server; ``verify`` runs in the workers that are forked from it.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._verifiers = {name: verifier_class(name)(setup.options) for name in setup.verifiers}
        self._answer = _compiled(setup.answer_pattern)
        self._format = _compiled(setup.format_pattern)
        processes = any(verifier.starts_processes for verifier in self._verifiers.values())
        options = setup.options
        self._limits = WorkerLimits("reward", options.timeout_s, options.memory_bytes, processes)
        for verifier in self._verifiers.values():
            verifier.prepare()

    def verify(self, name: str | None, task: Task, response: str) -> dict[str, Any]:
        """The verdict on a response, as far as it is known after ``timeout_s``.

        ``accuracy`` and ``format`` in [0, 1]; ``problem`` where something could not be judged (it
        is 0 here); ``extracted`` as a verdict has it; ``last`` where this process must not judge
        another response, because code was interrupted in the middle or memory was full.

        Args:
            name: the verifier; None: only the format is judged.
        """
        verdict: dict[str, Any] = {"accuracy": 0.0, "format": 0.0, "problem": None}
        if len(response) > _MAX_RESPONSE_CHARACTERS:
            problem = f"it is too long to judge: over {_MAX_RESPONSE_CHARACTERS} characters"
            return {**verdict, "problem": problem}
        # A scorer that draws random numbers gives one response one verdict, whatever came before.
        seed_libraries(0)
        work = partial(self._fill, verdict, name, task, response)
        return verdict | self._limits.problem_of(work)

    def _fill(self, verdict: dict[str, Any], name: str | None, task: Task, response: str) -> None:
        """Writes each result as soon as it is known, so that what comes later cannot lose it."""
        accuracy = Verdict(0.0)
        if name is not None:
            answer = response if self._answer is None else self._answer.last_group(response)
            if answer is not None:
                accuracy = self._verified(name, task, answer)
            else:
                accuracy = Verdict(0.0, extracted="")
            # A plug-in's verdict may hold a number of numpy, which JSON does not write.
            verdict["accuracy"] = float(accuracy.accuracy)
            verdict["extracted"] = accuracy.extracted
        if self._format is not None:
            verdict["format"] = float(self._format.matches_all(response))
        verdict["problem"] = accuracy.problem

    def _verified(self, name: str, task: Task, answer: str) -> Verdict:
        """The verdict; an exception becomes its problem, so that the format is still judged."""
        try:
            return self._verifiers[name].verify(task, answer)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return Verdict(0.0, reason(error))


def _compiled(pattern: str | None) -> ResponsePattern | None:
    return None if pattern is None else ResponsePattern(pattern)


def seed_libraries(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # it takes no larger one


@dataclass
class WorkerLimits:
    """Of a worker: inside ``with limits:`` OutOfTimeError is raised after ``seconds``, and again
    every ``_AGAIN_S`` for code that catches it.

    Attributes:
        section: of the configuration that says them.
        processes: It may start some.
        fatal: Errors after which another worker has to take over.
    """

    section: str
    seconds: float
    memory_bytes: int
    processes: bool
    fatal: tuple[type[Exception], ...] = ()
    _is_set: bool = False
    _cpu_limited_at: float = -math.inf
    _armed: bool = False

    def problem_of(self, work: Callable[[], None]) -> dict[str, Any]:
        """Does the work of one item: ``problem`` where it did not come to its end, and ``last``
        where this process must not do another."""
        self._renew()
        limit = f"{self.section}.memory_gib = {self.memory_bytes / 2**30:g} GiB"
        try:
            with self:
                work()
        except OutOfTimeError:
            problem = f"no answer within {self.section}.timeout_s = {self.seconds:g} s"
            return {"problem": problem, "last": True}
        except MemoryError:
            return {"problem": f"MemoryError: it wanted more than {limit}", "last": True}
        except Exception as error:  # noqa: BLE001 - the item's code; the reason is kept
            found = {"problem": reason(error)}
            return {**found, "last": True} if isinstance(error, self.fatal) else found
        return {}

    def _renew(self) -> None:
        """Outside of what turns errors of an item's code into its problem."""
        # Not before the first item: the server itself must stay free to fork.
        if not self._is_set:
            limit_processes_and_memory(self.memory_bytes, processes=self.processes)
            signal.signal(signal.SIGALRM, self._ring)
            self._is_set = True
        # Once a second is enough: the call takes longer than many verdicts.
        if time.monotonic() > self._cpu_limited_at + 1.0:
            self._cpu_limited_at = time.monotonic()
            limit_cpu_seconds(self.seconds + 1.0)

    def __enter__(self) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN_S)

    def __exit__(self, *raised: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise OutOfTimeError


def limit_processes_and_memory(memory_bytes: int, *, processes: bool) -> None:
    """Limits this process to ``memory_bytes`` more memory and no core file.

    Unless ``processes``, it cannot start any, which the kernel does not enforce for root. Where the
    machine runs out of memory, it is the first to be killed.
    """
    # From -1000 (never) to 1000 (first); to raise it takes no rights.
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    # The first number of statm is the size of the address space, in pages: what RLIMIT_AS counts.
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, used_bytes + memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    if not processes:
        _lower(resource.RLIMIT_NPROC, 0)


def limit_cpu_seconds(seconds: float) -> None:
    """Makes the kernel kill this process when it computes for ``seconds`` more.

    That holds also when the trainer, which would kill it, is gone.
    """
    spent = resource.getrusage(resource.RUSAGE_SELF)
    # The kernel counts whole seconds, and ``int`` has cut some off.
    allowed = int(spent.ru_utime + spent.ru_stime + seconds) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # The hard limit stays: without rights it could not be raised again for the next response.
    resource.setrlimit(resource.RLIMIT_CPU, (_within(allowed, hard), hard))


def _lower(limit: int, value: int) -> None:
    value = _within(value, resource.getrlimit(limit)[1])
    resource.setrlimit(limit, (value, value))


def _within(value: int, hard: int) -> int:
    if hard == resource.RLIM_INFINITY:  # -1, the least number of all
        return value
    return min(value, hard)
