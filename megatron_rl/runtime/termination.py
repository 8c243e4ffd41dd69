"""SIGTERM ends a rank at once, with one line, wherever it is.

A Python signal handler does not run while the main thread waits inside a collective. The byte that
the interpreter writes to a pipe when the signal arrives does come, and a thread reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from megatron_rl.runtime import failure
from megatron_rl.runtime.failure import STATE, Message, leave


def answer_termination() -> None:
    """From now on. Call it in the main thread, where alone Python lets one set handlers. Processes
    made by a plain fork do not inherit it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _arrived)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_answer, args=(reading,), name="SIGTERM", daemon=True).start()


def _arrived(number: int, frame: FrameType | None) -> None:
    """All that counts is the byte in the pipe."""


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _answer(reading: int) -> None:
    while os.read(reading, 1) != bytes([signal.SIGTERM]):
        pass  # another signal with a handler of its own
    if not STATE.reporting.acquire(blocking=False):
        STATE.terminated.set()
        return
    STATE.terminated.set()
    gone = failure.gone_ranks()
    text = "ended by SIGTERM"
    if gone:
        text = f"error: {failure.without_word(gone)}"
    leave(_end(Message(text + failure.unsaved()), bool(gone)))


def _end(message: Message, by_others: bool) -> int:
    """The exit code: 0 where another rank of this machine has failed, else that of a SIGTERM."""
    code = failure.say_or_follow(message, by_others=by_others)
    return code and 128 + signal.SIGTERM
