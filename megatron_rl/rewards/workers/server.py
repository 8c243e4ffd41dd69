"""The trainer's end of a server of workers: it starts the server, asks it for workers, talks to
them, and kills those that overrun."""

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from megatron_rl.rewards.workers.messages import PoolSetup

logger = logging.getLogger(__name__)

# Seconds to wait before the first, second, ... start in a row. The delays outlast what kills
# processes for a while (a lack of memory, an operator); a server that cannot start ends the run in
# seconds.
START_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)


class RewardWorker:
    """The socket to one worker. What waits for it raises TimeoutError at ``ends_at`` (of
    ``time.monotonic``) and another OSError when the worker is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid: int | None = None
        self._ready = False
        self._unread = b""
        # A worker that is dropped without ``kill`` ends, too: it sees the socket close.
        weakref.finalize(self, sock.close)

    def send(self, message: Any, ends_at: float) -> None:
        pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._limit(ends_at)
        self._sock.sendall(pickled)

    def replies(self, ends_at: float) -> list[dict[str, Any]]:
        """Those that have arrived, at least one."""
        while b"\n" not in self._unread:
            self._limit(ends_at)
            chunk = self._sock.recv(1 << 16)
            if not chunk:
                raise ConnectionError("the worker has ended")
            self._unread += chunk
        # What follows the last line break is a reply that has not arrived whole.
        *lines, self._unread = self._unread.split(b"\n")
        return [reply for line in lines for reply in json.loads(line)]

    def wait_until_ready(self, ends_at: float) -> None:
        """Raises ValueError when it refuses to work, with its reason."""
        while not self._ready:
            for reply in self.replies(ends_at):
                if "refused" in reply:
                    raise ValueError(reply["refused"])
                self._pid = reply.get("pid", self._pid)
                self._ready = "ready" in reply

    def kill(self) -> None:
        """Ends the worker and all processes of its session."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._sock.close()

    def _limit(self, ends_at: float) -> None:
        # Not 0, which means not to wait at all and raises another error.
        self._sock.settimeout(max(ends_at - time.monotonic(), 0.001))


class WorkerServer:
    """A server process, started in the background, and again when it is gone; for many threads."""

    def __init__(self, setup: PoolSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._failed_starts = 0
        self._lock = threading.Lock()

    def worker(self) -> RewardWorker:
        """A new worker, whose first replies are its pid and that it is ready.

        Raises:
            RuntimeError: after each of ``START_DELAYS_S`` the server ended before a worker was up.
        """
        ours, theirs = socket.socketpair()
        worker = RewardWorker(ours)
        with theirs, self._lock:
            while True:
                control = self._control or self._start()
                try:
                    socket.send_fds(control, [b"+"], [theirs.fileno()])
                    return worker
                except OSError:
                    self._forget()

    def works(self) -> None:
        """Must be called when a worker has become ready."""
        self._failed_starts = 0

    def close(self) -> None:
        """Ends the server, and its workers with it."""
        if self._control is not None and self._process is not None:
            _end(self._control, self._process)
        self._control = None
        self._process = None

    def is_gone(self) -> bool:
        """Whether the server process has ended by itself; the next worker starts another one."""
        with self._lock:
            if self._process is None or self._process.poll() is None:
                return False
            self._forget()
            return True

    def _start(self) -> socket.socket:
        if self._failed_starts:
            time.sleep(START_DELAYS_S[self._failed_starts - 1])
        self._control, theirs = socket.socketpair()
        # The child must find the package where this process has, which sys.path alone may know.
        package_parent = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.rewards.workers.worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._control, self._process)
        assert self._process.stdin is not None
        setup = pickle.dumps(self._setup)
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(setup)  # where it died at once, the next message shows it
        return self._control

    def _forget(self) -> None:
        """Reaps a server that ended, and counts it."""
        assert self._process is not None and self._control is not None
        code = self._process.wait()
        self._process = None
        self._control.close()
        self._control = None
        self._failed_starts += 1
        if self._failed_starts > len(START_DELAYS_S):
            raise RuntimeError(
                f"the server of the verifiers ended {self._failed_starts} times while starting"
                f" (exit code {code}; -9: killed, often for lack of memory); what it wrote is above"
            )
        logger.warning(
            "the server of the verifiers ended (exit code %d) and is started again", code
        )


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()
