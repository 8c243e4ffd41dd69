"""Judging responses in worker processes, within limits that hold whatever the responses are.

A response that cannot be judged within ``reward.timeout_s`` is stopped by a timer inside its
worker; where even that cannot interrupt (one huge power is one instruction) the worker's process
group is killed after a second more. So a batch of n hostile responses would take n x timeout /
workers. ``reward.step_timeout_s`` bounds that sum: when it is used up, responses without a verdict
count as not judged. Honest answers take milliseconds, and are not lost unless hostile ones occupy
every worker.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rewards.workers.messages import PoolSetup
from megatron_rl.rewards.workers.server import RewardWorker, WorkerServer
from megatron_rl.runtime.guard.activity import ACTIVITY

_GRACE_S = 1.0  # the worker's own timer acts first
_START_TIMEOUT_S = 600.0  # the import of a reward function may load a model
_MAX_DEATHS = 3  # of a worker in a row, while it starts
_MAX_CHUNK = 32
_SECONDS_FOR_A_THREAD = 0.002

Reply = dict[str, Any]


@dataclass
class WorkerPool:
    """``num_workers`` workers of one server, each served by a thread.

    ``limit``: seconds for one item, with the key of the configuration that sets them. ``restarts``
    counts the workers that died or were killed.
    """

    setup: PoolSetup
    limit: tuple[str, float]
    num_workers: int = 1
    step_timeout_s: float = math.inf
    restarts: int = 0
    _workers: list[RewardWorker] = field(default_factory=list)
    _seconds_each: float = math.inf  # of a verdict, in the last call

    def __post_init__(self) -> None:
        self._server = WorkerServer(self.setup)
        self._threads = ThreadPoolExecutor(self.num_workers, "verifier")

    def start(self) -> None:
        """Starts the workers in the background, so that they import while the trainer builds."""
        while len(self._workers) < self.num_workers:
            self._workers.append(self._server.worker())

    def wait_until_ready(self) -> None:
        """Returns when a worker has imported what it needs; raises as ``judge``."""
        self.start()
        self._ready(0)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._server.close()
        self._threads.shutdown()

    def judge(self, items: Sequence[Any], at_most_s: float = math.inf) -> list[Reply]:
        """What a worker answers to each item; ``accuracy``, ``format`` and ``problem`` where there
        is no answer.

        Takes at most ``step_timeout_s`` and a second; ``at_most_s``: what is left of it.

        Raises:
            ValueError: the workers cannot import a plug-in or the user's function.
            RuntimeError: the workers cannot be started.
        """
        self.start()
        # To wake a thread takes longer than many verdicts: the work must be worth it.
        worth = self._seconds_each * len(items) / _SECONDS_FOR_A_THREAD
        batch = _Batch(items, math.ceil(max(1, min(self.num_workers, len(items), worth))))
        batch.limit_s = min(at_most_s, self.step_timeout_s)
        began = time.monotonic()
        others = range(1, batch.num_workers)
        served = [self._threads.submit(self._serve, number, batch) for number in others]
        try:
            self._serve(0, batch)
        finally:
            wait(served)
        for end in served:
            end.result()  # raises what its thread met
        self._seconds_each = (time.monotonic() - began) * batch.num_workers / max(1, len(items))
        key = f"{self.limit[0].partition('.')[0]}.step_timeout_s"
        problem = f"{key} = {self.step_timeout_s:g} s was used up before its turn"
        return [reply or _not_judged(problem) for reply in batch.replies]

    def _serve(self, number: int, batch: _Batch) -> None:
        """The thread of one worker, until no item is waiting or the batch's time is up."""
        while batch.waiting and time.monotonic() < batch.ends_at:
            self._ready(number)
            # The batch's time begins with the first worker that is ready.
            batch.begin()
            rows = batch.take()
            if rows:
                self._judge_rows(number, rows, batch)

    def _judge_rows(self, number: int, rows: deque[int], batch: _Batch) -> None:
        worker = self._workers[number]
        key, seconds = self.limit
        try:
            ends_at = min(time.monotonic() + seconds + _GRACE_S, batch.ends_at)
            worker.send([batch.items[row] for row in rows], ends_at)
            while rows:
                for reply in worker.replies(ends_at):
                    batch.replies[rows.popleft()] = reply
                    if reply.get("last"):
                        batch.put_back(rows)  # it had not begun them
                        self._replace(number)
                        return
                ACTIVITY.note("judging responses")
                ends_at = min(time.monotonic() + seconds + _GRACE_S, batch.ends_at)
        except OSError as error:
            self._replace(number)
            problem = "the process that judged it died"
            if isinstance(error, TimeoutError):
                problem = (
                    f"no verdict within {key} = {seconds:g} s, and its worker had to be killed"
                )
            if time.monotonic() >= batch.ends_at:
                return  # none of them has an answer
            # Verdicts are sent some at a time, so which row it was judging is unknown: they are
            # handed out again, one by one.
            if len(rows) > 1:
                batch.put_back(rows, alone=True)
            else:
                batch.replies[rows[0]] = _not_judged(problem)

    def _ready(self, number: int) -> None:
        """Waits until a worker is ready; for another one where it dies before."""
        what = self.setup.name
        ends_at = time.monotonic() + _START_TIMEOUT_S
        num_deaths = 0
        while True:
            try:
                self._workers[number].wait_until_ready(ends_at)
            except TimeoutError:
                raise RuntimeError(
                    f"{what}: no worker was ready within {_START_TIMEOUT_S:g} s"
                ) from None
            except OSError:
                server_is_gone = self._replace(number)
                num_deaths += not server_is_gone  # which is counted by itself
                if num_deaths >= _MAX_DEATHS:
                    raise RuntimeError(f"{what}: its process dies while importing it") from None
            else:
                self._server.works()
                return

    def _replace(self, number: int) -> bool:
        """Another worker in place of one that is lost; whether its server is gone as well."""
        self._workers[number].kill()
        self.restarts += 1
        server_is_gone = self._server.is_gone()  # if so, the next worker starts another one
        self._workers[number] = self._server.worker()
        return server_is_gone


class _Batch:
    """Items to judge, and their replies so far, for several threads."""

    def __init__(self, items: Sequence[Any], num_workers: int) -> None:
        self.items = items
        self.num_workers = num_workers
        self.replies: list[Reply] = [{} for _ in items]
        self.waiting = deque(range(len(items)))
        self.limit_s = math.inf
        self.ends_at = math.inf
        self._alone: set[int] = set()  # rows that a worker gets one at a time
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.ends_at = min(self.ends_at, time.monotonic() + self.limit_s)

    def take(self) -> deque[int]:
        """Rows for one worker, a row of ``_alone`` by itself; few enough that the last rows of a
        batch do not all wait for one worker."""
        rows: deque[int] = deque()
        with self._lock:
            most = min(_MAX_CHUNK, math.ceil(len(self.waiting) / self.num_workers))
            while self.waiting and len(rows) < most:
                if rows and (rows[0] in self._alone or self.waiting[0] in self._alone):
                    break
                rows.append(self.waiting.popleft())
        return rows

    def put_back(self, rows: Iterable[int], *, alone: bool = False) -> None:
        """To the front, in their order."""
        with self._lock:
            self.waiting.extendleft(reversed([*rows]))
            if alone:
                self._alone.update(rows)


def _not_judged(problem: str) -> Reply:
    return {"accuracy": 0.0, "format": 0.0, "problem": problem}
