"""The server process behind ``megatron_rl.rewards.workers.pool``: imports once, forks workers.

Started as ``python -m megatron_rl.rewards.workers.worker FD``. Its standard input is the
``WorkerSetup``; the control socket FD brings one socket a message: for each the server forks a
worker that serves it to its end. A worker that hangs is killed by the trainer (its whole process
group), which then asks for another one: that takes milliseconds, because the slow imports come
before the fork. The server ends when the trainer is gone, and its workers with it.

It is a plain child rather than a ``multiprocessing`` one, which would import the trainer's main
module again. It has one thread, so that a fork is safe.
"""

import os
import pickle
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from megatron_rl.rewards.workers.messages import PoolSetup, WorkerSetup, reason, send
from megatron_rl.runtime.process import end_with_it, open_streams

# Verdicts of this time are sent together: each message wakes the trainer.
_GATHER_S = 0.002


def main(control: socket.socket) -> None:
    """Serves until the trainer closes the control socket."""
    open_streams()  # a rank that has no stdout gives none
    setup: PoolSetup = pickle.load(sys.stdin.buffer)
    # A function is imported after the fork: it may start threads, which a fork would lose.
    is_function = isinstance(setup, WorkerSetup) and setup.takes_batches
    judge = None if is_function else _judge(setup)
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
            end_with_it(server)
            os.setsid()  # so that the trainer can kill it and what it starts by its group
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            send(lane, {"pid": os.getpid()})
            # A name of its own, so that it lives until the exit: a client that is dropped before,
            # with its connections to a judge open, complains on stderr.
            judge = judge or _judge(setup)
            with suppress(ConnectionError):  # the trainer has ended
                _serve(lane, judge)
            os._exit(0)
        lane.close()


def _serve(lane: socket.socket, judge: Any) -> None:
    """Answers requests until the trainer closes the lane; refuses where ``judge`` is a text."""
    if isinstance(judge, str):
        send(lane, {"refused": judge})
        return
    send(lane, {"ready": True})
    requests = lane.makefile("rb")
    while requests.peek(1):  # empty: the trainer has closed it
        replies: list[dict[str, Any]] = []
        sent_at = time.monotonic()
        try:
            items = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):  # it has ended in the middle of a request
            return
        for item in items:
            replies.append(judge.verify(*item))
            sys.stdout.flush()  # what the user's code has printed
            last = bool(replies[-1].get("last"))
            if last or time.monotonic() > sent_at + _GATHER_S:
                send(lane, *replies)
                replies = []
                sent_at = time.monotonic()
            if last:
                return
        send(lane, *replies)


def _judge(setup: PoolSetup) -> Any:
    """What answers the requests, its imports done; where that fails the reason as a text."""
    from megatron_rl.plugins import load_plugins

    try:
        load_plugins(setup.plugins)
        if not isinstance(setup, WorkerSetup):
            return setup.judge()
        if setup.takes_batches:
            # Deferred: its HTTP client is nothing that a verifier waits for.
            from megatron_rl.rewards.workers.function_worker import FunctionJudge

            return FunctionJudge(setup)
        from megatron_rl.rewards.workers.response_verifier import ResponseVerifier

        return ResponseVerifier(setup)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of a plug-in's verifier; reported by the trainer
        return f"{setup.name}: no worker can prepare it ({reason(error)}); fix it"


if __name__ == "__main__":
    try:
        main(socket.socket(fileno=int(sys.argv[1])))
    except (ConnectionError, EOFError, pickle.UnpicklingError):
        # The trainer has ended, perhaps before this was ready.
        sys.exit(0)
