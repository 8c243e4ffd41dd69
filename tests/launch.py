"""Start a program on several processes with torchrun, as a user does, and never leave one
behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests import warm

REPO = Path(__file__).resolve().parent.parent
TAIL_LINES = 80


def torchrun(script: str | Path, nproc: int = 2, torchrun_args: Sequence[str] = ()) -> list[str]:
    """The command that starts ``script`` (a .py file, or a module name as in ``python -m``)."""
    target = [str(script)] if str(script).endswith(".py") else ["-m", str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={nproc}", *torchrun_args, *target]


def launch(
    script: str | Path,
    nproc: int = 2,
    args: Sequence[object] = (),
    timeout: float = 180,
    *,
    env: Mapping[str, str] | None = None,
    torchrun_args: Sequence[str] = (),
    check: bool = True,
    is_warm: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` (a .py file, or a module name as in ``python -m``) on ``nproc`` processes of
    this machine.

    With ``is_warm``, torchrun and the ranks are forked from a process that has imported the
    libraries (tests/warm): it saves 15 s of CPU a rank. Not for a test of what happens between a
    rank and its parent. ``env`` is added to the environment; ``args`` go to the script. ``stdout``
    of the result holds both streams of all ranks. The port is chosen by torchrun
    (``--standalone``). On time-out, on an exception and at the end every process of the launch is
    dead. Raises AssertionError with the end of the output on time-out and, with ``check``, on an
    exit code other than 0.
    """
    command = torchrun(script, nproc, torchrun_args)
    command += [str(arg) for arg in args]
    if is_warm:
        python = str(warm.python())
        command[0] = python
        env = {**(env or {}), "PYTHON_EXEC": python}  # what torchrun starts its ranks with
    return run(command, timeout, env=env, check=check)


def run(
    command: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPO,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run any command with the same care: merged output, own session, all descendants dead
    afterwards."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    child_env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_env,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            end(process)
        output.seek(0)
        text = output.read()
    shown = f"{' '.join(command)}\n" + "\n".join(text.splitlines()[-TAIL_LINES:])
    assert returncode is not None, f"no end within {timeout} s: {shown}"
    assert returncode == 0 or not check, f"exit code {returncode}: {shown}"
    return subprocess.CompletedProcess(list(command), returncode, stdout=text, stderr="")


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill the process and what it started. The ranks of torchrun lead sessions of their own, so a
    kill of the process group would miss them: walk the tree, and let the agent end its ranks
    first."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=5)
    for survivor in alive:
        survivor.kill()
    psutil.wait_procs(alive, timeout=10)
    process.wait()
