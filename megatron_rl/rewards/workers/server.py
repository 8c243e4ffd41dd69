"""The trainer's end of a server of workers.

It starts the server, asks it for workers, and kills workers that overrun.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from megatron_rl.rewards.workers.messages import HEADER, WorkerSetup

logger = logging.getLogger(__name__)

# Seconds to wait before the first, second, ... start in a row. The delays outlast what kills
# processes for a while (a lack of memory, an operator); a server that cannot start ends the run in
# seconds.
START_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)


class Lane:
    """A socket to one worker.

    Reading and writing never block: the pool watches many lanes at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.pid: int | None = None
        self.ready = False
        self._unsent = memoryview(b"")
        self._unread = b""
        # A lane that is dropped without ``kill`` ends its worker, too: that sees the socket close.
        weakref.finalize(self, sock.close)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def queue(self, message: Any) -> None:
        """Sets the message that ``write`` sends."""
        frame = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._unsent = memoryview(HEADER.pack(len(frame)) + frame)

    def write(self) -> bool:
        """Sends what fits now; False when the worker is gone."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def read(self) -> list[dict[str, Any]] | None:
        """The replies that have arrived; None when the worker is gone and left none."""
        gone = True
        try:
            while chunk := self.sock.recv(1 << 16):
                self._unread += chunk
        except BlockingIOError:
            gone = False
        except OSError:
            pass  # a broken connection ends as a closed one
        # What follows the last line break is a reply that has not arrived whole.
        *lines, self._unread = self._unread.split(b"\n")
        if gone and not lines:
            return None
        replies: list[dict[str, Any]] = []
        for line in lines:
            replies += json.loads(line)
        return replies

    def kill(self) -> None:
        """Ends the worker and all processes of its session."""
        if self.pid is not None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.pid = None
        self.sock.close()


class WorkerServer:
    """One server process, started in the background, and again when it is gone.

    ``restarts`` counts how often it was gone.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._failed_starts = 0
        self.restarts = 0
        self.started_at = 0.0

    def lane(self) -> Lane:
        """A lane to a new worker, whose first replies are its pid and that it is ready.

        Raises:
            RuntimeError: the server ended after each of ``START_DELAYS_S``, before it had one
                worker ready.
        """
        ours, theirs = socket.socketpair()
        lane = Lane(ours)
        with theirs:
            while True:
                control = self._control or self._start()
                try:
                    socket.send_fds(control, [b"+"], [theirs.fileno()])
                    break
                except OSError:
                    self._forget()
        return lane

    def works(self) -> None:
        """Must be called when a worker has become ready."""
        self._failed_starts = 0

    def close(self) -> None:
        """Ends the server, and its workers with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def is_gone(self) -> bool:
        """Whether the server process has ended by itself; the next ``lane`` starts another one."""
        if self._process is None or self._process.poll() is None:
            return False
        self._forget()
        return True

    def _start(self) -> socket.socket:
        if self._failed_starts:
            time.sleep(START_DELAYS_S[self._failed_starts - 1])
        ours, theirs = socket.socketpair()
        # The child must find the package where this process has, which sys.path alone may know.
        package_parent = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.rewards.workers.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        frame = pickle.dumps(self._setup)
        try:
            ours.sendall(HEADER.pack(len(frame)) + frame)
        except OSError:
            self._forget()  # it died at once
            return self._start()
        weakref.finalize(self, _end, ours, self._process)
        self._control = ours
        self.started_at = time.monotonic()
        return ours

    def _forget(self) -> None:
        """Reaps a server that ended, and counts it."""
        assert self._process is not None
        code = self._process.wait()
        self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None
        self.restarts += 1
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
