"""Ranks end with their torchrun.

Linux only: elsewhere a rank whose torchrun is killed runs on until it misses a message of another
rank.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# In the environment of a program whose own children shall end with it, see ``die_with_server``.
FOR_CHILDREN = "MEGATRON_RL_CHILDREN_DIE_WITH_PARENT"

# Taken at import: a torchrun that is killed before `end_with_it` sends no signal, but then it is
# no longer the parent.
_PARENT = os.getppid()


def end_with_it(parent: int = _PARENT) -> None:
    """Makes the kernel kill this process when its parent ends, however that ends.

    SIGKILL and not SIGTERM: an unsupervised rank must not write another byte into a folder
    that the next start of the run already uses. What is on the disk stays whole, as after any kill.
    """
    die_with_parent()
    if sys.platform.startswith("linux") and os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


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
