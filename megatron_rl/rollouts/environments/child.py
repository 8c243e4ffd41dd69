"""Programs that the worker of an environment starts."""

import sys

# Ends with its worker, even where that is killed (PR_SET_PDEATHSIG), and may compute longer than a
# worker may for one answer.
_PROGRAM = (
    "import ctypes, os, resource, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "limit = resource.getrlimit(resource.RLIMIT_CPU)[1]\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def words_of_child(*words: str) -> list[str]:
    """The command that runs ``words`` and ends with this process."""
    return [sys.executable, "-ISc", _PROGRAM, *words]
