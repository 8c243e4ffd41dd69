"""A Python whose imports are already done.

``python()`` is a program that takes the command line of Python (``[-u] script.py ...`` or
``[-u] -m module ...``). A server (server.py) has imported torch, transformers, megatron and vLLM
once and forks; the child runs the script as ``__main__``, with the working directory, environment
and standard streams of whoever called. The program (client.py) stands for the child: it passes
signals on, ends as the child ends, and takes it along when it is killed.

What differs from a start of Python: nobody's child is a child of its caller (the parent is the
server), and libraries have read their environment variables when the server started. Nothing of
megatron_rl is imported before the fork.

The processes of ``pytest -n`` share one server. It lives as long as the process that hands out the
tests.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
START_S = 250.0  # imports on a loaded machine; below the limit of pytest for a test
_STARTED: list[subprocess.Popen[bytes]] = []
_FOLDERS: list[Path] = []
_SHARED: list[tuple[Path, int]] = []  # (folder, owner) of the server of several processes


def python() -> Path:
    """The program. The first call of a test session starts the server."""
    if _SHARED:
        place, owner = _SHARED[0]
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "python").exists():
                _STARTED.append(_start(place, owner))
        return place / "python"
    if not _STARTED:
        _STARTED.append(_start(folder(), os.getpid()))
    return folder() / "python"


def folder() -> Path:
    """Of the server, made by the first call and removed by ``close``."""
    if not _FOLDERS:
        _FOLDERS.append(Path(tempfile.mkdtemp(prefix="warm.")))
    return _FOLDERS[0]


def share(place: Path, owner: int) -> None:
    """``python()`` is from now on that of all processes with this ``folder()`` of ``owner``, which
    ends last."""
    _SHARED[:] = [(place, owner)]


def is_shared() -> bool:
    return bool(_SHARED)


def close() -> None:
    """Ends the server and what still runs on it, where it is this process that has it."""
    for process in [] if _SHARED else _STARTED:
        process.terminate()
        process.wait(10)
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop())


def _start(place: Path, owner: int) -> subprocess.Popen[bytes]:
    socket = place / "socket"
    log = place / "log"
    ready, theirs = os.pipe()
    with log.open("w") as output:
        command = [sys.executable, "-m", "tests.warm.server", socket, theirs, owner]
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"},
            cwd=REPO,
            pass_fds=(theirs,),
            start_new_session=True,
        )
    os.close(theirs)
    with open(ready, "rb") as answers:
        assert answers.read(), f"the server did not start:\n{log.read_text()}"
    words = [sys.executable, "-ISE", str(Path(__file__).with_name("client.py")), str(socket)]
    program = place / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return process
