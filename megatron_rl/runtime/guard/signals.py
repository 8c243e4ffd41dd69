"""Preemption: SIGUSR1 requests a checkpoint and a regular end at the next step boundary.

SIGTERM saves nothing: it ends a rank at once (``runtime/guard/termination.py``), also one that
waits inside a collective for ranks that are gone.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """True once SIGUSR1 has arrived. Create it in the main thread."""

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested
