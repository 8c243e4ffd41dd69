"""Limits of the kernel on a worker: its life, its memory, its processes, its computing time."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

from megatron_rl.rewards.verdict import Options

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """This process is killed when ``parent`` ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def limit_processes_and_memory(options: Options, *, processes: bool) -> None:
    """From here on this process may take ``options.memory_bytes`` more memory, write no core file,
    and start no process unless ``processes`` (which the kernel does not hold against root). Where
    the machine runs out of memory it is the first to be killed."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + options.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    if not processes:
        _lower(resource.RLIMIT_NPROC, 0)


def limit_cpu_seconds(seconds: float) -> None:
    """The kernel kills this process when it computes for longer than ``seconds`` from now, also
    where nobody else is left to do so."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(spent.ru_utime + spent.ru_stime + seconds) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard),
    )


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
