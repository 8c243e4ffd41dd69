"""Servers that have newer weights beside those that they sample with, and go over to them one by
one, each when it has done what is wanted of the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_rl.scheduling.scheduler import Scheduler

_AT_A_TIME = 64


@dataclass(frozen=True)
class Staged:
    """``version``: of the weights that a server has beside those in use; it keeps them when they
    are."""

    url: str
    version: int


class StagedWeightSwitcher:
    """By name of the server; one that has not joined yet is among them too: staged weights are the
    first that it gets. For the dispatcher's thread. ``command`` makes the server at a URL go over
    to a version, and raises ConnectionError where it does not."""

    def __init__(self, command: Callable[[str, int], None], scheduler: Scheduler) -> None:
        self._command = command
        self._scheduler = scheduler
        self._staged: dict[str, Staged] = {}
        self._running: set[str] = set()
        self._threads = ThreadPoolExecutor(_AT_A_TIME, "switches")

    def staged(self, name: str, url: str, version: int) -> None:
        """A server has these weights beside those in use."""
        self._staged[name] = Staged(url, version)

    def forget(self, name: str) -> None:
        """A server is marked dead."""
        self._staged.pop(name, None)

    def begin(self) -> list[str]:
        """The servers that are to go over now; the caller has ``carry_out`` run for each."""
        names = []
        for name in self._open():
            worker = self._scheduler.queue.workers.get(name)
            if name in self._running or (worker is not None and worker.is_held):
                continue
            if worker is not None:
                if not self._scheduler.may_switch(name):
                    continue
                if self._scheduler.rules.lockstep:  # else what runs goes on with the new ones
                    self._scheduler.queue.recall(name)  # it is idle: nothing waits again
            self._running.add(name)
            names.append(name)
        return names

    async def carry_out(self, name: str) -> Staged | None:
        """What the server has now; None where it was marked dead meanwhile.

        Raises ConnectionError."""
        staged = self._staged.get(name)
        try:
            if staged is not None:
                loop = asyncio.get_running_loop()
                command = (self._command, staged.url, staged.version)
                await loop.run_in_executor(self._threads, *command)
        except ConnectionError:
            if self._staged.get(name) is staged:
                raise
        finally:
            self._running.discard(name)
        return staged if self._staged.get(name) is staged else None

    def close(self) -> None:
        """Nobody waits for what is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def newcomers(self) -> set[str]:
        """Those that have not joined yet."""
        return set(self._staged) - set(self._scheduler.queue.workers)

    def bring(self, version: int) -> bool:
        """Whether a server will go over to this version by itself."""
        return any(self._staged[name].version == version for name in self._open())

    @property
    def is_over(self) -> bool:
        """Whether every server uses what it was given last."""
        return not self._running and not any(self._open())

    def _open(self) -> Iterator[str]:
        for name, staged in self._staged.items():
            worker = self._scheduler.queue.workers.get(name)
            if worker is None or worker.version < staged.version:
                yield name
