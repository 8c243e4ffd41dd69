"""The sandbox in which programs of the policy run.

``bubblewrap`` (the default): no network, nothing of this machine but Python and the system's
libraries, both read-only, a private ``/tmp`` in memory, its own process table, an empty
environment, no rights.

``rlimits_only`` is for machines where bubblewrap cannot be installed or user namespaces are
disabled, and is weaker: limits on time, memory, files and processes hold, no socket can be opened
and no other process touched, and the environment is empty. It does NOT stop a program from reading,
and overwriting, whatever files the user who runs the training may read and write.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_rl.errors import first_line

_TMP_BYTES = 64 << 20
_MAX_OUTPUT_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 20.0
_REMEDY = (
    "install it (apt-get install bubblewrap), allow user namespaces, or take the weaker"
    " reward.sandbox=rlimits_only (megatron_rl/rewards/sandbox.py says what that does not stop)"
)
# Flags of bwrap, one purpose a line.
_ISOLATION = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),  # 65534: nobody
    *("--ro-bind", "/usr", "/usr"),
    *("--proc", "/proc"),
    *("--dev", "/dev"),
    *("--size", str(_TMP_BYTES), "--tmpfs", "/tmp"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
)


class Sandbox:
    """One running program, for a ``with`` block, which ends it and everything it has started."""

    def __init__(
        self, kind: str, program: str, *, stdin: str | None, memory_bytes: int, ends_at: float
    ) -> None:
        """
        Args:
            kind: ``bubblewrap`` or ``rlimits_only``.
            stdin: None: the program is imported and then asked with ``ask``; a text: it is run as a
                script that reads this.
            ends_at: on the clock of ``time.monotonic``.
        """
        self._kind = kind
        self._ends_at = ends_at
        self._order = {
            "program": program,
            "input": stdin,
            "memory_bytes": memory_bytes,
            "cpu_s": max(1, int(ends_at - time.monotonic()) + 1),
        }
        self._unread = b""

    def __enter__(self) -> Sandbox:
        # The working directory of a program without bubblewrap; with it, its ``--chdir`` is.
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_rl_code_")
        self._process = subprocess.Popen(
            command(self._kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env={},
        )
        # A program that does not read fills the pipe; ``_say`` then waits no longer than it may.
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._say(self._order)
        return self

    def __exit__(self, *raised: object) -> None:
        # Killed first: closing a pipe makes a program that reads it continue.
        self._process.kill()
        with self._folder, self._process:  # closes the pipes, waits, then removes the folder
            pass

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; None when there is no well-formed one in time."""
        self._say(request)
        while b"\n" not in self._unread:
            chunk = self._read()
            if not chunk:
                return None
            self._unread += chunk
            if len(self._unread) > _MAX_OUTPUT_BYTES:
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def output(self) -> str | None:
        """The whole output of a script that succeeded in time; else None.

        None also for more than ``_MAX_OUTPUT_BYTES``.
        """
        text = b""
        while chunk := self._read():
            text += chunk
            if len(text) > _MAX_OUTPUT_BYTES:
                return None
        if time.monotonic() >= self._ends_at:
            return None
        try:
            code = self._process.wait(max(0.0, self._ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        return text.decode("utf-8", "replace") if code == 0 else None

    def _say(self, message: dict[str, Any]) -> None:
        """Writes a line; that a program is gone or does not read shows when no answer comes."""
        rest = memoryview(json.dumps(message).encode("ascii") + b"\n")
        while rest and (left_s := self._ends_at - time.monotonic()) > 0:
            if not select.select([], [self._stdin], [], left_s)[1]:
                return
            try:
                rest = rest[os.write(self._stdin, rest) :]
            except BrokenPipeError:
                return

    def _read(self) -> bytes:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0 or not select.select([self._stdout], [], [], left_s)[0]:
            return b""
        return os.read(self._stdout, 1 << 16)


def _bwrap() -> str | None:
    """The machine's bubblewrap, else the one that tools/setup_cpu.sh has put beside Python."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=Path(sys.executable).parent)


@functools.cache
def command(kind: str) -> list[str]:
    """The command that starts Python in a sandbox of this kind."""
    source = Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8")
    start = [os.path.realpath(sys.executable), "-I", "-S", "-c", source]
    if kind == "rlimits_only":
        return start
    arguments = [_bwrap() or "bwrap", *_ISOLATION]
    # Links into /usr on most systems, folders on some.
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    # Of the Python of a virtual environment the interpreter and its library lie elsewhere.
    home = os.path.realpath(sys.base_prefix)
    if not home.startswith("/usr/"):
        arguments += ["--ro-bind", home, home]
    return [*arguments, "--chdir", "/tmp", "--", *start]


@functools.cache
def refusal(kind: str) -> str | None:
    """Why programs cannot run in such a sandbox on this machine, by running one; None: they can."""
    if kind == "bubblewrap" and _bwrap() is None:
        return f"reward.sandbox = bubblewrap: bwrap is not installed; {_REMEDY}"
    ends_at = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        with Sandbox(kind, "", stdin=None, memory_bytes=1 << 29, ends_at=ends_at) as sandbox:
            answer = sandbox.ask({"nonce": "probe", "expression": "6 * 7"})
    except OSError as error:
        return f"reward.sandbox = {kind}: cannot be started ({first_line(error)}); {_REMEDY}"
    if answer == {"nonce": "probe", "value": "42"}:
        return None
    # Once more, for its message.
    ended = subprocess.run(
        command(kind), input="", env={}, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
    )
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    message = lines[-1] if lines else "no message"
    return f"reward.sandbox = {kind}: does not run Python here ({message}); {_REMEDY}"
