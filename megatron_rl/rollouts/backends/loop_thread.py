"""A thread with an event loop, to which the main thread hands work over."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

Result = TypeVar("Result")
REPORT_EVERY_S = 1.0


class LoopThread:
    """``call`` and ``stop`` are for the main thread, ``soon`` is for any thread, all else for this
    one. What a task of ``spawn`` or ``soon`` raises is raised in ``until`` and ``unless_failed``.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._alive: set[asyncio.Task] = set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(
        self,
        work: Coroutine[Any, Any, Result],
        meanwhile: Callable[[], None] | None = None,
    ) -> Result:
        """Result of ``work``. ``meanwhile``: the caller runs it every ``REPORT_EVERY_S``."""
        outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        if meanwhile is not None:
            while not wait([outcome], REPORT_EVERY_S).done:
                meanwhile()
        return outcome.result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._alive.add(task)
        task.add_done_callback(self._note_end)
        return task

    def cancel_all(self) -> None:
        for task in list(self._alive):
            task.cancel()

    def soon(self, work: Callable[[], None]) -> None:
        """Has the thread call ``work``; for any thread."""
        self._loop.call_soon_threadsafe(self._call, work)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (raised where the main thread waits)
            self._fail(error)

    @property
    def has_failed(self) -> bool:
        """Whether something has been raised that the main thread will see."""
        return self._failure is not None

    def changed(self) -> None:
        """Has ``until`` look again."""
        self._changed.set()

    async def until(self, answer: Callable[[], Result | None]) -> Result:
        """Waits until there is an answer; raises what has failed meanwhile."""
        while True:
            if self._failure is not None:
                raise self._failure
            found = answer()
            if found is not None:
                return found
            self._changed.clear()
            await self._changed.wait()

    async def unless_failed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Result of ``work``, which is cancelled where another task has failed: it might wait for a
        server that nothing watches any more."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            await self.until(lambda: task.done() or None)
        finally:
            task.cancel()
        return task.result()

    def _note_end(self, task: asyncio.Task) -> None:
        self._alive.discard(task)
        self._fail(None if task.cancelled() else task.exception())

    def _fail(self, error: BaseException | None) -> None:
        self._failure = self._failure or error  # the first: others may follow from it
        self._changed.set()
