"""How many files and connections a process may have open.

Every gloo group holds a connection to each of its ranks, and a rank is in several groups of the
size of the world. The usual limit of 1,024 is therefore reached at some 340 ranks.
"""

from __future__ import annotations

import os
import resource

# Some libraries walk over all numbers below the limit, and some systems have a limit of 2**30.
_ENOUGH = 2**20


def raise_limit(pid: int) -> int:
    """Raises the soft limit of the process to its hard limit, which needs no privilege; returns the
    soft limit of now."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    wanted = _ENOUGH
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def raise_limit_of_torchrun() -> None:
    """Raises the limit of the parent of this process, which holds a connection to every rank of the
    launch where it serves their store."""
    try:
        raise_limit(os.getppid())
    except (PermissionError, ProcessLookupError):  # another user's, or it ends
        return
