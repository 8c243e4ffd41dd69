"""What every program of a launch sets up first.

It may open as many files as the system lets it, it ends with its torchrun, it ends at once on
SIGTERM, and its errors are reported once (``runtime/guard/failure.py``).
"""

import ctypes
import functools
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.runtime.guard.failure import STATE, exit_process, report
from megatron_rl.runtime.guard.signals import answer_termination

# Some libraries walk over all numbers below the limit, and some systems have a limit of 2**30.
_ENOUGH_FILES = 2**20
PR_SET_PDEATHSIG = 1
# In the environment of a program whose own children shall end with it, see ``die_with_server``.
FOR_CHILDREN = "MEGATRON_RL_CHILDREN_DIE_WITH_PARENT"
# Taken at import: a torchrun that is killed before `end_with_it` sends no signal, but then it is
# no longer the parent.
_PARENT = os.getppid()


def launched() -> tuple[int, int | None]:
    """The rank of this process and how many torchrun has started on its machine (None without
    torchrun), before any process group exists."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    return STATE.rank, int(local_size) if local_size.isdecimal() else None


@functools.cache
def prepare() -> None:
    """Once per process, in its main thread. ``launch.start`` does it where ``reported`` did not."""
    raise_limit(os.getpid())
    open_streams()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent is a shell, which may end earlier
        end_with_it()
        # That of the parent, too: where torchrun serves the store of the launch, it holds a
        # connection to every rank.
        with suppress(PermissionError, ProcessLookupError):  # another user's, or it ends
            raise_limit(os.getppid())
    answer_termination()
    # Last: a rank that has arrived answers SIGTERM, see ``failure.say_or_follow``.
    STATE.first_failure.arrive()


@contextmanager
def reported() -> Iterator[None]:
    """Around a whole program: an exception inside is reported once and ends the process.

    See ``failure.report``. ``SystemExit`` passes before the ranks have met (``--help``); later it
    comes from code of the user, whose end is not that of the run.

    Example::

        with reported():
            world = start()
            ...
        exit_process(0)
    """
    prepare()
    try:
        yield
    except SystemExit as error:
        if not STATE.peers:
            raise
        fault = RuntimeError(
            f"sys.exit({error.code!r}) inside of the run; return or raise an error there instead"
        )
        exit_process(report(fault.with_traceback(error.__traceback__)))
    except BaseException as error:  # noqa: BLE001 (reported, then the process ends)
        exit_process(report(error))


def open_streams() -> None:
    """Gives a program that was started with a closed stream (``>&-``) one that leads nowhere: some
    libraries flush it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (for as long as the process)


def raise_limit(pid: int) -> int:
    """Raises the soft limit of open files to the hard limit, which needs no privilege; returns the
    soft limit of now.

    Every gloo group holds a connection to each of its ranks, and a rank is in several groups of the
    size of the world. The usual limit of 1,024 is therefore reached at some 340 ranks.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def end_with_it(parent: int = _PARENT) -> None:
    """Makes the kernel kill this process when its parent ends, however that ends. Linux only:
    elsewhere a rank whose torchrun is killed runs on until it misses a message of another rank.

    SIGKILL and not SIGTERM: an unsupervised rank must not write another byte into a folder
    that the next start of the run already uses. What is on the disk stays whole, as after any kill.
    """
    die_with_parent()
    if sys.platform.startswith("linux") and os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def restored_variables(names: Collection[str]) -> Iterator[None]:
    """Afterwards these variables of the environment are as they were."""
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def die_with_server() -> None:
    """``die_with_parent`` in a child of a program whose environment has ``FOR_CHILDREN``."""
    if FOR_CHILDREN in os.environ and multiprocessing.parent_process() is not None:
        die_with_parent()


def die_with_parent() -> None:
    """The same as ``preexec_fn`` of a program that is started."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
