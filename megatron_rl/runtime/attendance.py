"""Says which ranks are missing when a collective of control takes long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger(__name__)

_PRESENT_S = 2.0  # a rank that waits longer tells the others that it is there
FIRST_S = 30.0  # until the first line
_NEXT_S = 60.0  # between that and further ones


class Attendance:
    """Watches the collectives of control; ``look`` is called by the thread of the heartbeat.

    The ranks call the same collectives in the same order, so its number identifies a collective. A
    rank that waits in one writes the number to the store of the launch; ranks that have not are
    missing. A collective that takes less than ``_PRESENT_S`` costs nothing.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._waiting: tuple[int, float] | None = None  # number of the collective, since when
        self._number = 0
        self._announced = 0  # the last collective that this rank has said it waits in
        self._due_s = FIRST_S

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective of all ranks."""
        self._number += 1
        self._waiting = (self._number, time.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def look(self, store: dist.TCPStore) -> None:
        """Says that this rank waits, and from time to time for whom.

        Raises:
            RuntimeError: the store is gone.
        """
        # One read: the main thread may leave the collective at any moment.
        waiting = self._waiting
        if waiting is None or time.monotonic() - waiting[1] < _PRESENT_S:
            return
        number, since = waiting
        if self._announced != number:
            store.set(_key(self._rank), str(number))
            self._announced = number
            self._due_s = FIRST_S
        waited_s = time.monotonic() - since
        if waited_s >= self._due_s:
            self._due_s += _NEXT_S
            self._report(_missing(store, self._size, number), waited_s)

    def _report(self, absent: list[int], waited_s: float) -> None:
        """The first of the waiting ranks says it, for all of them."""
        present = [rank for rank in range(self._size) if rank not in absent]
        if absent and present[0] == self._rank:
            # An error, because only errors are shown from ranks other than 0.
            logger.error(
                "waiting for %s for %.0f s: busy, stopped or hung?", in_words(absent), waited_s
            )


def connect() -> dist.TCPStore:
    """Another connection to the store of the launch: the one of the process group belongs to the
    main thread."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )


def _key(rank: int) -> str:
    return f"megatron_rl/waiting/{rank}"


def _missing(store: dist.TCPStore, size: int, number: int) -> list[int]:
    """Ranks that do not wait in this collective."""
    waiting = [rank for rank in range(size) if store.check([_key(rank)])]
    here = {rank for rank in waiting if int(store.get(_key(rank))) == number}
    return [rank for rank in range(size) if rank not in here]


def in_words(numbers: list[int]) -> str:
    """Example: ``[1, 3]`` gives ``ranks 1, 3``; of many the first eight."""
    shown = ", ".join(map(str, numbers[:8]))
    more = ", ..." if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {shown}{more}"
