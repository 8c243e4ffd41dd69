"""The server process behind ``megatron_rl.rewards.workers.pool``: it imports once and forks the
workers.

Started as ``python -m megatron_rl.rewards.workers.worker FD``. The control socket FD brings the
``WorkerSetup`` first, then one socket a message: for each the server forks a worker that serves it
to its end. A worker that hangs is killed by the trainer (its whole process group), which then asks
for another one: that takes milliseconds, because the slow imports come before the fork. The server
ends when the trainer is gone, and its workers with it.

It is a plain child rather than a ``multiprocessing`` one, which would import the trainer's main
module again. It has one thread, so that a fork is safe.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from typing import Any

from megatron_rl.plugins import load_plugins
from megatron_rl.rewards.workers.limits import end_with
from megatron_rl.rewards.workers.messages import WorkerSetup, read_frame, reason, refuse, send

# Verdicts of this time are sent together: each message wakes the trainer.
_GATHER_S = 0.002


def main(control: socket.socket) -> None:
    """Serves until the trainer closes the control socket."""
    frame = read_frame(control)
    if frame is None:  # the trainer has ended already
        return
    setup: WorkerSetup = pickle.loads(frame)
    verifier = None
    refusal = None
    try:
        if setup.function is None:
            verifier = _load_verifier(setup)
    except ValueError as error:
        refusal = str(error)
    except Exception as error:  # noqa: BLE001 - of a plug-in's verifier; said by the trainer
        names = ", ".join(setup.verifiers)
        refusal = f"reward.verifier = {names}: no worker can prepare it ({reason(error)}); fix it"
    # The kernel reaps dead workers; the trainer sees their sockets close.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = os.getpid()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        lane = socket.socket(fileno=descriptors[0])
        lane.set_inheritable(False)
        if os.fork() == 0:
            control.close()
            end_with(server)
            os.setsid()  # so that the trainer can kill it and what it starts by its group
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            send(lane, {"pid": os.getpid()})
            code = refuse(lane, refusal) if refusal else _serve(lane, setup, verifier)
            sys.stdout.flush()
            os._exit(code)
        lane.close()


def _serve(lane: socket.socket, setup: WorkerSetup, verifier: Any) -> int:
    """Answers requests until the trainer closes the lane; returns the exit code."""
    if setup.function is not None:
        from megatron_rl.rewards.workers.function_worker import serve_function

        return serve_function(lane, setup)
    send(lane, {"ready": True})
    while (frame := read_frame(lane)) is not None:
        verdicts: list[dict[str, Any]] = []
        sent_at = time.monotonic()
        for name, task, response in pickle.loads(frame):
            verdicts.append(verifier.verify(name, task, response))
            last = bool(verdicts[-1].get("last"))
            if last or time.monotonic() > sent_at + _GATHER_S:
                send(lane, *verdicts)
                verdicts = []
                sent_at = time.monotonic()
            if last:
                return 0
        send(lane, *verdicts)
    return 0


def _load_verifier(setup: WorkerSetup) -> Any:
    """The verifiers of a pool with all their imports done.

    Raises:
        ValueError: a plug-in cannot be imported here, or does not register what it should.
    """
    from megatron_rl.rewards.workers.response_verifier import ResponseVerifier

    load_plugins(setup.plugins)
    return ResponseVerifier(setup)


if __name__ == "__main__":
    try:
        main(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:  # the trainer has ended, perhaps before this process was ready
        sys.exit(0)
