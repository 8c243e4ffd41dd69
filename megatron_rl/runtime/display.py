"""What a user sees while a run works: its phase, and the progress of generation.

On a terminal one live line below the log; elsewhere (a file, a pipe, Slurm's output) plain lines:
one when a phase begins, and one every ``_LOG_EVERY_S`` seconds of a long generation. Only rank 0
shows anything.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

from megatron_rl.runtime.guard.activity import ACTIVITY

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0
_LONG_S = 10.0  # a phase that took longer gets a line with its duration


@dataclass(frozen=True)
class Progress:
    """How far a generation is, over all replicas. Tokens are of all responses, done or not.

    Example: ``Progress(num_done=12, num_wanted=64, num_tokens=5210, longest=391)``.
    """

    num_done: int
    num_wanted: int  # responses that are done or requested so far
    num_tokens: int
    longest: int  # tokens of the longest response that is not done
    age: int = 0  # updates since the oldest weights, or the oldest response, of what is under way


class _Output(Console):
    """Stdout; a reader that goes away (``| head``) ends no run."""

    def on_broken_pipe(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        logger.error("the reader of stdout is gone: the run continues without output there")


class Display:
    """The phases of a run, as they begin and end.

    Example: ``with display.phase("building the policy"): ...`` prints ``building the policy ...``
    to a log, or shows it with a spinner on a terminal until the block ends.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown``: False on every rank but the first."""
        self.console = console or _Output(soft_wrap=True, highlight=False)
        self._shown = shown
        self._clock = clock
        self._live = shown and self.console.is_terminal
        self._status: Status | None = None
        self.seconds: dict[str, float] = {}  # of phases that have a name for the metrics

    def line(self, text: str) -> None:
        """Prints a line that stays on the screen."""
        if self._shown:
            self.console.print(text, markup=False)

    @contextmanager
    def phase(
        self, text: str, *, announced: bool = True, name: str | None = None
    ) -> Iterator[None]:
        """Shows ``text`` while the block runs, then its duration if that was long.

        Args:
            announced: a log gets a line when the phase begins. False for phases of every step,
                which a terminal shows all the same.
            name: its seconds are kept in ``seconds`` under this name.
        """
        ACTIVITY.note(text)
        begin = time.monotonic()
        with self._visible(text, announced):
            yield
        if name is not None:
            self.seconds[name] = time.monotonic() - begin

    @contextmanager
    def _visible(self, text: str, announced: bool) -> Iterator[None]:
        if not self._shown:
            yield
            return
        begin = self._clock()
        if announced and not self._live:
            self.line(f"{text} ...")
        if self._status is not None:  # inside another phase
            self._status.update(text)
        elif self._live:
            self._status = self.console.status(text)
            self._status.start()
        try:
            yield
        finally:
            if self._status is not None:
                self._status.stop()
                self._status = None
        seconds = self._clock() - begin
        if announced and seconds >= _LONG_S:
            self.line(f"{text}: {duration(seconds)}")

    def generating(self, what: str) -> Callable[[Progress], None]:
        """A function to be called during a generation.

        A log gets a line every ``_LOG_EVERY_S`` seconds, so nothing of a short generation.

        Args:
            what: which generation this is, e.g. "step 12".
        """
        begin = self._clock()
        last_line = begin

        def report(progress: Progress) -> None:
            nonlocal last_line
            now = self._clock()
            is_due = self._shown and not self._live and now - last_line >= _LOG_EVERY_S
            if self._status is None and not is_due:
                return
            elapsed = max(now - begin, 1e-9)
            text = f"{what}: {in_words(progress, elapsed)}, {duration(elapsed)}"
            if self._status is not None:
                self._status.update(text)
            else:
                last_line = now
                self.line(text)

        return report


def in_words(progress: Progress, seconds: float) -> str:
    """Example: ``12 of 64 responses, 950 tokens/s, longest 391, oldest 2 updates``."""
    speed = progress.num_tokens / seconds
    done = f"{progress.num_done} of {progress.num_wanted} responses, {speed:.0f} tokens/s"
    longest = f", longest {progress.longest}" if progress.longest else ""
    updates = "update" if progress.age == 1 else "updates"
    oldest = f", oldest {progress.age} {updates}" if progress.age else ""
    return f"{done}{longest}{oldest}"


def duration(seconds: float) -> str:
    """A time span with two units at most: ``8 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
