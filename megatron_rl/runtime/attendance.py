"""Who is missing: a line when ranks wait long for others in a collective of control."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

CHECK_S = 1.0
PRESENT_S = 2.0  # a rank that waits longer tells the others that it is there
FIRST_S = 30.0
NEXT_S = 60.0


class Attendance:
    """The ranks call the same collectives in the same order, so the number of a collective names it.
    A rank that waits in one writes the number to the store of the launch; who has not is missing.
    A collective that takes less than PRESENT_S costs nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._waiting: tuple[int, float] | None = None  # number of the collective, since when
        self._number = 0
        threading.Thread(target=self._watch, name="attendance", daemon=True).start()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective of all ranks."""
        self._number += 1
        self._waiting = (self._number, time.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def _watch(self) -> None:
        store: dist.TCPStore | None = None
        present, due = 0, FIRST_S
        while True:
            time.sleep(CHECK_S)
            waiting = self._waiting
            if waiting is None or time.monotonic() - waiting[1] < PRESENT_S:
                continue
            number, since = waiting
            try:
                store = store or connect()
                if present != number:
                    store.set(key(self._rank), str(number))
                    present, due = number, FIRST_S
                waited = time.monotonic() - since
                if waited >= due:
                    due += NEXT_S
                    self._tell(missing(store, self._size, number), waited)
            except RuntimeError:  # the store has gone, and soon this process
                return

    def _tell(self, absent: list[int], waited: float) -> None:
        """By the first of those that wait."""
        present = [rank for rank in range(self._size) if rank not in absent]
        if absent and present[0] == self._rank:
            text = f"waiting for {ranks(absent)} for {waited:.0f} s: busy, stopped or hung?\n"
            sys.stderr.write(text)
            sys.stderr.flush()


def connect() -> dist.TCPStore:
    """A connection of its own: the one of the process group belongs to the main thread."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=30)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def key(rank: int) -> str:
    return f"megatron_rl/waiting/{rank}"


def missing(store: dist.TCPStore, size: int, number: int) -> list[int]:
    """Ranks that do not wait in this collective."""
    there = [rank for rank in range(size) if store.check([key(rank)])]
    reached = {rank for rank in there if int(store.get(key(rank))) == number}
    return [rank for rank in range(size) if rank not in reached]


def ranks(numbers: list[int]) -> str:
    """Example: ``[1, 3]`` gives ``ranks 1, 3``; of many the first eight."""
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
