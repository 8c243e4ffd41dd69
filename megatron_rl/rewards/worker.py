"""The process behind ``megatron_rl.rewards.pool``: a server that imports once and forks the workers.

Started as ``python -m megatron_rl.rewards.worker FD``. The control socket FD brings the ``Setup`` first, then one socket a message: for
each the server forks a worker that serves it to its end. A worker that hangs is killed by the trainer (its whole process group), which
then asks for another one: that takes milliseconds, because what takes seconds is imported before the fork. The server ends when the
trainer is gone, and its workers with it. It is a plain child rather than a ``multiprocessing`` one: those import the trainer's main
module again, and it has one thread, so that a fork is safe.

Only a response is foreign text. Requests hold the run's own data and are pickled; what a worker answers is
JSON, a list of replies a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import first_line
from megatron_rl.plugins import load_plugins
from megatron_rl.rewards.verdict import Options

HEADER = struct.Struct("<Q")  # bytes of the pickle that follows
PR_SET_PDEATHSIG = 1
MAX_REASON_CHARACTERS = 300
GATHER_S = 0.002  # verdicts of so long go out together: each message wakes the trainer, which has other things to do


@dataclass(frozen=True)
class Setup:
    """What the workers of one pool do: judge single responses (``verifiers``), or call a function on whole batches.

    Example: ``Setup(plugins=(), verifiers=("math",), options=options, answer_pattern=None, format_pattern="<a>.*</a>", function=None)``.
    """

    plugins: tuple[str, ...]
    verifiers: tuple[str, ...]
    options: Options
    answer_pattern: str | None
    format_pattern: str | None
    function: str | None


def main(control: socket.socket) -> None:
    """Serves until the trainer closes the control socket."""
    setup: Setup = pickle.loads(read_frame(control) or b"")
    judge = None
    try:
        if setup.function is None:
            judge = load_judge(setup)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries dead workers; the trainer sees their sockets close
    server = os.getpid()
    while True:
        _, lanes, _, _ = socket.recv_fds(control, 1, 1)
        if not lanes:
            return
        lane = socket.socket(fileno=lanes[0])
        lane.set_inheritable(False)
        if os.fork() == 0:
            control.close()
            end_with(server)
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            send(lane, {"pid": os.getpid()})
            code = refuse(lane, refusal) if refusal else serve(lane, setup, judge)
            sys.stdout.flush()
            os._exit(code)
        lane.close()


def serve(lane: socket.socket, setup: Setup, judge: Any) -> int:
    """Answers requests until the trainer closes the lane; the exit code."""
    if setup.function is not None:
        from megatron_rl.rewards.function_worker import serve_function

        return serve_function(lane, setup)
    send(lane, {"ready": True})
    while (frame := read_frame(lane)) is not None:
        verdicts: list[dict[str, Any]] = []
        sent_at = time.monotonic()
        for name, task, response in pickle.loads(frame):
            verdicts.append(judge.judge(name, task, response))
            last = bool(verdicts[-1].get("last"))
            if last or time.monotonic() > sent_at + GATHER_S:
                send(lane, *verdicts)
                verdicts, sent_at = [], time.monotonic()
            if last:
                return 0
        send(lane, *verdicts)
    return 0


def load_judge(setup: Setup) -> Any:
    """The judge with all its imports done.

    Raises:
        ValueError: a plug-in cannot be imported here, or does not register what it should.
    """
    from megatron_rl.rewards.judge import Judge

    load_plugins(setup.plugins)
    return Judge(setup)


def refuse(lane: socket.socket, reason: str) -> int:
    send(lane, {"refused": reason})
    return 1


def end_with(parent: int) -> None:
    """This process is killed when ``parent`` ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def limit_processes_and_memory(options: Options, *, processes: bool) -> None:
    """From here on this process may take ``options.memory_bytes`` more memory, write no core file, and start no process unless
    ``processes`` (which the kernel does not hold against root)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + options.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    if not processes:
        _lower(resource.RLIMIT_NPROC, 0)


def limit_cpu_seconds(seconds: float) -> None:
    """The kernel kills this process when it computes for longer than ``seconds`` from now, also where nobody else is left to do so."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(spent.ru_utime + spent.ru_stime + seconds) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def send(lane: socket.socket, *replies: dict[str, Any]) -> None:
    lane.sendall(json.dumps(replies).encode("ascii") + b"\n")


def reason(error: BaseException) -> str:
    """``<kind>: <what it says>``, short. Example: ``ValueError: not a number``."""
    text = f"{type(error).__name__}: {first_line(error)}"
    return text[:MAX_REASON_CHARACTERS]


def read_frame(sock: socket.socket) -> bytes | None:
    """One message, or None at the end of the stream."""
    head = _read(sock, HEADER.size)
    return None if head is None else _read(sock, HEADER.unpack(head)[0])


def _read(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        chunk = sock.recv(min(size - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
