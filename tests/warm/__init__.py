"""A Python whose imports are already done.

``python()`` is a program that takes the command line of Python (``[-u] script.py ...`` or
``[-u] -m module ...``). A server (server.py) has imported torch, transformers, megatron and vLLM
once and forks; the child runs the script as ``__main__``, with the working directory, environment
and standard streams of whoever called. The program (client.py) stands for the child: it passes
signals on, ends as the child ends, and takes it along when it is killed.

What differs from a start of Python: nobody's child is a child of its caller (the parent is the
server), and libraries have read their environment variables when the server started. Nothing of
megatron_rl is imported before the fork.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
START_S = 250.0  # imports on a loaded machine; below the limit of pytest for a test
_STARTED: list[_Server] = []


def python() -> Path:
    """The program. The first call of a test session starts the server."""
    if not _STARTED:
        _STARTED.append(_Server())
    return _STARTED[0].program


def close() -> None:
    """Ends the server and what still runs on it."""
    while _STARTED:
        _STARTED.pop().close()


class _Server:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm.")
        folder = Path(self._folder.name)
        socket = folder / "socket"
        words = [sys.executable, "-ISE", str(Path(__file__).with_name("client.py")), str(socket)]
        self.program = folder / "python"
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.program.chmod(0o755)
        log = folder / "log"
        ready, theirs = os.pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.server", str(socket), str(theirs)],
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

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()
