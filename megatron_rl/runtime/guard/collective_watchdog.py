"""Logs which ranks are missing when a control collective takes long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger(__name__)

_PRESENT_S = 2.0  # a rank that waits longer announces that it is there
FIRST_S = 30.0  # until the first line
_NEXT_S = 60.0  # between that and further ones


class CollectiveWatchdog:
    """Watches the collectives of control; ``check`` is called by the thread of the heartbeat.

    The ranks call the same collectives in the same order, so its number identifies a collective. A
    rank that waits in one writes the number to the store of the launch; ranks that have not are
    missing. A collective that takes less than ``_PRESENT_S`` costs nothing.

    The store serves all ranks: one of them looks for the others, rank 0 where it waits itself, and
    else the first to claim it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._waiting: tuple[int, float] | None = None  # number of the collective, since when
        self._number = 0
        self._announced = 0  # the last collective that this rank has announced it waits in
        self._due_s = FIRST_S
        self._looks = rank == 0

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective of all ranks."""
        self._number += 1
        self._waiting = (self._number, time.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def check(self, store: dist.TCPStore) -> None:
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
            if self._rank > 0 and self._due_s == FIRST_S:
                self._looks = store.add(f"megatron_rl/looks/{number}", 1) == 1
            self._due_s += _NEXT_S
            if self._looks:
                self._report(store, number, waited_s)

    def _report(self, store: dist.TCPStore, number: int, waited_s: float) -> None:
        """Says who is missing, for all that wait. The console has the lines of rank 0 alone where
        each rank has a file: it says so itself as soon as it waits."""
        if self._rank > 0 and 0 not in _missing(store, [0], number):
            return
        absent = _missing(store, range(self._size), number)
        if absent:
            # An error, because only errors are shown from ranks other than 0.
            logger.error(
                "waiting for %s for %.0f s: busy, stopped or hung?", rank_list(absent), waited_s
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


def _missing(store: dist.TCPStore, ranks: Sequence[int], number: int) -> list[int]:
    """Those of ``ranks`` that do not wait in this collective."""
    # Not in one request: a read waits for keys that were not written.
    waiting = [rank for rank in ranks if store.check([_key(rank)])]
    numbers = store.multi_get([_key(rank) for rank in waiting]) if waiting else []
    here = {rank for rank, other in zip(waiting, numbers, strict=True) if int(other) == number}
    return [rank for rank in ranks if rank not in here]


def rank_list(numbers: list[int]) -> str:
    """Example: ``[1, 3]`` gives ``ranks 1, 3``; of many the first eight."""
    shown = ", ".join(map(str, numbers[:8]))
    more = ", ..." if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {shown}{more}"
