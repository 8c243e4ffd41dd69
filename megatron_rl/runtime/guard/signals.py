"""SIGUSR1 requests a checkpoint and a regular end at the next step boundary (preemption).

SIGTERM saves nothing and ends a rank at once, with one line, also inside a collective.

A Python signal handler does not run while the main thread waits inside a collective. But the
interpreter writes a byte to a pipe when the signal arrives, and a thread reads that.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.failure import STATE, FailureMessage, exit_process


def noted_stop() -> Callable[[], bool]:
    """Whether SIGUSR1 has arrived, from now on. For the main thread."""
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    return lambda: bool(came)


def answer_termination() -> None:
    """Ends this process on SIGTERM and SIGHUP from now on; a plain fork does not inherit that.

    For the main thread, where alone Python lets one set handlers.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # else ``set_wakeup_fd`` refuses it
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _arrived)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _arrived)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_answer, args=(reading,), name="SIGTERM", daemon=True).start()


def _arrived(number: int, frame: FrameType | None) -> None:
    """Nothing to do: the byte in the pipe is what counts."""


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _answer(reading: int) -> None:
    number = 0
    while number not in (signal.SIGTERM, signal.SIGHUP):  # others have handlers of their own
        (number,) = os.read(reading, 1)
    if not STATE.reporting.acquire(blocking=False):
        STATE.terminated.set()
        return
    STATE.terminated.set()
    gone = failure.gone_ranks()
    text = f"ended by {signal.Signals(number).name}"
    host = None
    if gone:
        text = f"error: {failure.without_word(gone)}"
        host = socket.gethostname()
    message = FailureMessage(text + failure.unsaved())
    code = failure.say_or_follow(message, by_others=bool(gone), host=host)
    if code != 0:  # 0: another rank of this machine has failed
        code = 128 + number  # as a shell says it
    exit_process(code)
