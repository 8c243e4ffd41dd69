"""torchrun program: joins the launch as a training run does, then fails in the way that is named.

errors_worker.py CASE [RANK]
"""

from __future__ import annotations

import os
import signal
import sys
import time

from megatron_rl.runtime.guard.failure import exit_process, saved
from megatron_rl.runtime.process import reported


def before_joining(case: str, rank: int) -> None:
    mine = int(os.environ["RANK"])
    if case == "early_all" or (case == "early_one" and mine == rank):
        raise ValueError("data.train: no such file; correct the path")


def fail(case: str, rank: int, mine: int) -> None:
    if case == "user_all" or (case == "user_one" and mine == rank):
        raise ValueError("model.path: the last layer has another shape; correct it")
    if case == "long" and mine == rank:
        raise ValueError("\n".join(f"problem {number}" for number in range(50)))
    if case == "fault_all" or (case == "fault_one" and mine == rank):
        raise KeyError("a fault")
    if case == "memory" and mine == rank:
        raise MemoryError
    if case == "kill" and mine == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "segfault" and mine == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "stop" and mine == rank:
        time.sleep(60)


def main(case: str, rank: int) -> None:
    before_joining(case, rank)
    from megatron_rl.runtime.launch import start

    world = start()
    os.write(1, f"pid {os.getpid()}\n".encode())  # one write: the ranks share a pipe
    saved(3)
    world.barrier()
    if case == "compute" and world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("compute", "busy"):
        time.sleep(60)
    fail(case, rank, world.rank)
    world.barrier()
    if case == "serve":
        while True:
            world.barrier()
            time.sleep(0.05)


if __name__ == "__main__":
    with reported():
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    exit_process(0)
