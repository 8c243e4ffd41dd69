"""Limits that the kernel sets on a worker: memory, processes, CPU time."""

from __future__ import annotations

import resource

from megatron_rl.rewards.base import Options


def limit_processes_and_memory(options: Options, *, processes: bool) -> None:
    """Limits this process to ``options.memory_bytes`` more memory and no core file.

    Unless ``processes``, it cannot start any, which the kernel does not enforce for root. Where the
    machine runs out of memory, it is the first to be killed.
    """
    # From -1000 (never) to 1000 (first); to raise it takes no rights.
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    # The first number of statm is the size of the address space, in pages: what RLIMIT_AS counts.
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, used_bytes + options.memory_bytes)
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
