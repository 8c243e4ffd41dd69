"""torchrun program: ranks that wait long, hang, or are lost, with limits that a test can wait for.

waiting_worker.py CASE FOLDER; the last rank is the one something happens to.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from megatron_rl.runtime.guard.failure import STATE, exit_process, saved
from megatron_rl.runtime.guard.first_failure import FAILED_HOST
from megatron_rl.runtime.process import reported

OLD_LIMIT_S = 1.0
TAIL_S = 5 * OLD_LIMIT_S
STALL_S = 4.0


def sleep(seconds: float, works: bool) -> None:
    """As a rank that gets on with its work, or as one that hangs."""
    from megatron_rl.runtime.guard.activity import ACTIVITY

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if works:
            ACTIVITY.note("the tail")
        time.sleep(0.1)


def hold_the_interpreter() -> None:
    """Never returns and never lets another thread run, as a pattern on a hostile text does."""
    re.fullmatch("(a|a)*b", "a" * 60)


def happen(case: str) -> None:
    if case == "tail":
        sleep(TAIL_S, works=True)
    elif case == "hang":
        sleep(600, works=False)
    elif case == "hold":
        hold_the_interpreter()
    elif case.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.startswith("raise"):
        raise ValueError("a fault of rank 3")


def main(case: str, folder: str) -> None:
    # One machine of the test for each torchrun of it.
    machine = f"machine{os.environ['GROUP_RANK']}"
    socket.gethostname = lambda: machine
    from megatron_rl.runtime.launch import start

    world = start()
    stalls = case in ("hang", "hold", "late end")
    world.watch(STALL_S if stalls else 60.0, Path(folder) / "stacks")
    STATE.failed_host = Path(folder) / FAILED_HOST
    world.begin_training()
    saved(3)
    os.write(1, f"pid {os.getpid()} rank {world.rank}\n".encode())  # the ranks share a file
    world.barrier()
    if world.rank == world.size - 1:
        happen(case)
    elif case.endswith("busy"):
        sleep(600, works=True)
    world.barrier()
    if case == "late end" and world.rank == 0:
        sleep(2 * STALL_S, works=False)
    os.write(1, f"rank {world.rank} lives\n".encode())


if __name__ == "__main__":
    # What torch gives a group that names no limit, scaled down.
    import torch.distributed.distributed_c10d as c10d

    c10d.default_pg_timeout = timedelta(seconds=OLD_LIMIT_S)
    with reported():
        main(sys.argv[1], sys.argv[2])
    exit_process(0)
