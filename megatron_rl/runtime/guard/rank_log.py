"""One file for the output of each rank; the console has rank 0."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron_rl.runtime.guard.failure import STATE


def to_file(folder: Path, rank: int, launch_id: str) -> None:
    """Sends both streams of this process, libraries in C and children included, to
    ``folder/rank_N.log``, after those of earlier starts. The first failure of a launch is reported
    on the console all the same (``failure.say``).

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(folder / f"rank_{rank}.log", flags, 0o644)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.write(file, f"--- launch {launch_id}, rank {rank}, {when}\n".encode())
    # What Python has buffered so far belongs to the console.
    sys.stdout.flush()
    sys.stderr.flush()
    STATE.console = os.dup(2)
    # Numbers 1 and 2 themselves, which libraries in C write to and children inherit.
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
