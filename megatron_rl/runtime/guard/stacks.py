"""Stacks of the threads of this process, for a launch that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.runtime.guard.activity import ACTIVITY

SIGNAL = signal.SIGUSR2
_SHOWN = 6  # different places
_WAITING = "launch.py"  # the collectives of control: their caller says more


def answer_signal() -> None:
    """Registers a handler: ``kill -USR2 PID`` makes this process write the stacks of all its
    threads to its stderr and continue, also where the main thread is inside a library."""
    faulthandler.register(SIGNAL, all_threads=True)


def ask(pid: int) -> None:
    """Makes another process, which has called ``answer_signal``, write its stacks; nothing where it
    has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)


def dump(rank: int, folder: Path | None) -> None:
    """Writes the stacks of all threads to ``folder/rank_N.txt``; to stderr where that cannot be."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank_{rank}.txt").open("w", encoding="utf-8") as file:
                file.write(f"rank {rank}, process {os.getpid()}: {place()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return
        except OSError as error:
            sys.stderr.write(f"(stacks not written to {folder}: {error.strerror})\n")
    faulthandler.dump_traceback(2, all_threads=True)


def place() -> str:
    """The place of the main thread in this package, and what it did last.

    Examples: ``rollouts.py:120 (run); last: generating``, ``waits in trainer.py:72 (run); last:
    ...`` for a rank that is in a collective of control.
    """
    # Not of the calling thread, which is mostly that of the heartbeat.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = list(traceback.extract_stack(frame))
    own = [each for each in stack if "megatron_rl" in Path(each.filename).parts] or stack
    waits = Path(own[-1].filename).name == _WAITING
    callers = [each for each in own if Path(each.filename).name != _WAITING]
    inside = (callers or own)[-1]
    where = f"{Path(inside.filename).name}:{inside.lineno} ({inside.name})"
    if waits:
        where = f"waits in {where}"
    return f"{where}; last: {ACTIVITY.doing}"


def rank_list(numbers: list[int]) -> str:
    """Example: ``[1, 3]`` gives ``ranks 1, 3``; of many the first eight."""
    shown = ", ".join(map(str, numbers[:8]))
    more = ", ..." if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {shown}{more}"


def stall_message(idle_s: float, places: Mapping[int, str], folder: Path | None) -> str:
    """The message for a launch that hangs: the ranks, grouped by where they are."""
    by_place: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        by_place.setdefault(where, []).append(rank)
    # The fewest first: the many wait for them.
    groups = sorted(by_place.items(), key=lambda item: len(item[1]))
    lines = [f"  {rank_list(ranks)}: {where}" for where, ranks in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        lines.append(f"  and {len(groups) - _SHOWN} more places")
    written = ""
    if folder is not None:
        written = f"; the stacks of all threads are in {folder}"
    limit = "raise trainer.stall_limit_s if this was work"
    first = f"no rank has got anything done for {idle_s:.0f} s ({limit}){written}"
    return "\n".join([first, *lines])
