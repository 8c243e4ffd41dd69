"""A lock on a folder that its holder cannot outlive: the package's beside ``filelock``, in turns.

    python tools/bench/locks.py

A process takes the lock, forks a child that lives on (a worker, a writer of checkpoints), and is
killed. Microseconds of taking and releasing; whether the lock is free then; what another process
can learn of the holder without taking the lock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import filelock
from gpu_model import table
from machine import Watch, description, in_turns, spread

from megatron_rl.runtime import lock

PAIRS = 2000


def by_library(folder: Path) -> filelock.FileLock:
    held = filelock.FileLock(folder / ".filelock")
    held.acquire(timeout=0)
    return held


def ours_us(folder: Path) -> float:
    start = time.perf_counter()
    for _ in range(PAIRS):
        lock.hold(folder, "launch")
        lock.release(folder)
    return (time.perf_counter() - start) / PAIRS * 1e6


def library_us(folder: Path) -> float:
    start = time.perf_counter()
    for _ in range(PAIRS):
        by_library(folder).release()
    return (time.perf_counter() - start) / PAIRS * 1e6


def orphaned(hold: Callable[[Path], object], free: Callable[[Path], bool], folder: Path) -> str:
    """Whether the lock is free behind a killed holder whose child lives."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        kept = hold(folder)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.write(writing, f"{child}\n".encode())
        time.sleep(30)
        os._exit(0 if kept is None else 0)
    child = int(os.read(reading, 64))
    while_held = free(folder)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    behind = free(folder)
    os.kill(child, signal.SIGKILL)
    return f"{'free' if while_held else 'held'}, then {'free' if behind else 'held'}"


def library_free(folder: Path) -> bool:
    try:
        by_library(folder).release()
    except filelock.Timeout:
        return False
    return True


def refused(look: Callable[[Path], object], take: Callable[[Path], None], folder: Path) -> str:
    """Starts that are refused although nobody but one who looks is there."""
    looker = os.fork()
    if looker == 0:
        while True:
            look(folder)
    count = 0
    for _ in range(PAIRS):
        try:
            take(folder)
        except (ValueError, filelock.Timeout):
            count += 1
    os.kill(looker, signal.SIGKILL)
    os.waitpid(looker, 0)
    return f"{count} of {PAIRS}"


def take_ours(folder: Path) -> None:
    lock.hold(folder, "launch")
    lock.release(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    watch = Watch()
    folder = Path(tempfile.mkdtemp())
    taken = in_turns({"ours": partial(ours_us, folder), "filelock": partial(library_us, folder)}, 7)
    state = {
        "ours": orphaned(
            lambda place: lock.hold(place, "launch 7"),
            lambda place: lock.holder(place) is None,
            folder,
        ),
        "filelock": orphaned(by_library, library_free, folder),
    }
    taken_while_looked_at = {
        "ours": refused(lock.holder, take_ours, folder),
        "filelock": refused(library_free, lambda place: by_library(place).release(), folder),
    }
    print(f"{description()}; filelock {filelock.__version__}; {watch.load()}\n")
    rows = []
    for way, times in taken.items():
        rows.append(
            {
                "way": way,
                "us to take and release": spread(times).text(0),
                "held, then holder killed": state[way],
                "refused while another looks": taken_while_looked_at[way],
            }
        )
    print(table(rows))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
