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
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.messages import WorkerSetup
from megatron_rl.rewards.workers.server import Lane, WorkerServer
from megatron_rl.runtime.guard.activity import ACTIVITY

_GRACE_S = 1.0  # the worker's own timer acts first
_START_TIMEOUT_S = 120.0
# A longer response is not judged, as a part of it could have another answer.
_MAX_RESPONSE_CHARACTERS = 1_000_000
_MAX_CHUNK = 32

Item = tuple[str | None, Task, str]  # verifier (None: only the format is wanted), task, response
Reply = dict[str, Any]


@dataclass
class _Work:
    """The rows that a worker has not answered, in order, and when it last answered one."""

    rows: deque[int] = field(default_factory=deque)
    since: float = 0.0


class WorkerPool:
    """``num_workers`` workers of one server.

    ``restarts`` counts the workers that died or were killed.
    """

    def __init__(self, setup: WorkerSetup, *, num_workers: int, step_timeout_s: float) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._step_timeout_s = step_timeout_s
        self._server = WorkerServer(setup)
        self._work: dict[Lane, _Work] = {}
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.restarts = 0

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the verifiers its workers have."""
        return self._setup.verifiers

    def start(self) -> None:
        """Starts the workers in the background, so that they import while the trainer builds."""
        while len(self._work) < self._num_workers:
            self._add_lane()

    def close(self) -> None:
        """Ends all workers."""
        for lane in list(self._work):
            self._drop(lane)
        self._server.close()

    def verify(self, items: Sequence[Item]) -> list[Reply]:
        """One reply an item: ``accuracy``, ``format``, ``problem``.

        Takes at most ``step_timeout_s`` and a second.

        Raises:
            ValueError: the workers cannot import a plug-in.
            RuntimeError: the workers cannot be started.
        """
        self.start()
        batch = PendingResponses(items, self._step_timeout_s)
        waiting_since = time.monotonic()
        while batch.unanswered:
            now = time.monotonic()
            # The batch's time begins with the first worker that is ready.
            if batch.ends_at is None and any(lane.ready for lane in self._work):
                batch.ends_at = now + self._step_timeout_s
            if batch.ends_at is None and now > waiting_since + _START_TIMEOUT_S:
                raise RuntimeError(
                    f"no worker of the verifiers was ready within {_START_TIMEOUT_S:g} s"
                )
            if batch.ends_at is not None and now > batch.ends_at:
                self._give_up(batch)
                break
            self._hand_out(batch, now)
            self._exchange(batch, self._patience(batch, now))
            self._stop_overdue(batch)
        return batch.replies

    def _hand_out(self, batch: PendingResponses, now: float) -> None:
        # Small enough that the last rows of a batch do not all wait behind one worker.
        share = min(_MAX_CHUNK, math.ceil(len(batch.waiting) / self._num_workers))
        for lane, work in self._work.items():
            if lane.ready and not work.rows and batch.waiting:
                work.rows.extend(batch.take(share))
                work.since = now
                lane.queue([batch.items[row] for row in work.rows])

    def _exchange(self, batch: PendingResponses, patience_s: float) -> None:
        """Writes and reads what does not block; waits for that for at most ``patience_s``."""
        for lane in list(self._work):
            if lane.wants_to_write and not lane.write():
                self._lost(lane, batch)
        for lane in self._work:
            # A socket can nearly always be written: asked for without need, it would not wait.
            events = selectors.EVENT_READ
            if lane.wants_to_write:
                events |= selectors.EVENT_WRITE
            self._selector.modify(lane.sock, events, lane)
        for key, _ in self._selector.select(patience_s):
            lane = key.data
            replies = lane.read()
            if replies is None:
                self._lost(lane, batch)
            for reply in replies or ():
                self._take(lane, reply, batch)

    def _take(self, lane: Lane, reply: Reply, batch: PendingResponses) -> None:
        work = self._work[lane]
        work.since = time.monotonic()
        ACTIVITY.note("judging responses")
        if "refused" in reply:
            raise ValueError(reply["refused"])
        if "pid" in reply:
            lane.pid = reply["pid"]
        elif "ready" in reply:
            lane.ready = True
            self._server.works()
        else:
            batch.answer(work.rows.popleft(), reply)
            if reply.get("last"):
                # It had not begun the others; back to the front, in their order.
                batch.waiting.extendleft(reversed(work.rows))
                self._replace(lane)

    def _lost(self, lane: Lane, batch: PendingResponses) -> None:
        """Replaces a worker that ended by itself or was killed from outside."""
        self._return(lane, batch, "the process that judged it died")

    def _stop_overdue(self, batch: PendingResponses) -> None:
        limit_s = self._setup.options.timeout_s
        now = time.monotonic()
        within = f"within reward.timeout_s = {limit_s:g} s"
        for lane, work in list(self._work.items()):
            if work.rows and now > work.since + limit_s + _GRACE_S:
                problem = f"no verdict {within}, and its worker had to be killed"
                self._return(lane, batch, problem)

    def _return(self, lane: Lane, batch: PendingResponses, problem: str) -> None:
        """Replaces a worker and hands out its rows again, one at a time.

        Which of them it was judging is unknown, because verdicts are sent some at a time.
        """
        rows = self._work[lane].rows
        if len(rows) == 1:
            batch.answer(rows[0], _not_judged(problem))
        else:
            batch.alone.update(rows)
            batch.waiting.extendleft(reversed(rows))
        self._replace(lane)

    def _give_up(self, batch: PendingResponses) -> None:
        for lane, work in list(self._work.items()):
            if work.rows:
                self._replace(lane)
        problem = f"reward.step_timeout_s = {self._step_timeout_s:g} s was used up before its turn"
        for row, reply in enumerate(batch.replies):
            if not reply:
                batch.answer(row, _not_judged(problem))

    def _patience(self, batch: PendingResponses, now: float) -> float:
        """Seconds until the next limit."""
        ends = [now + 1.0]
        if batch.ends_at is not None:
            ends = [batch.ends_at]
        for work in self._work.values():
            if work.rows:
                ends.append(work.since + self._setup.options.timeout_s + _GRACE_S)
        # A millisecond beyond the limit, so that it has passed when the wait is over.
        return max(0.0, min(ends) - now + 0.001)

    def _replace(self, lane: Lane) -> None:
        self._drop(lane)
        self.restarts += 1
        self._server.is_gone()  # if so, the next lane starts another server
        self._add_lane()

    def _add_lane(self) -> None:
        lane = self._server.lane()
        self._work[lane] = _Work()
        self._selector.register(lane.sock, selectors.EVENT_READ, lane)

    def _drop(self, lane: Lane) -> None:
        self._selector.unregister(lane.sock)
        del self._work[lane]
        lane.kill()


class PendingResponses:
    """Items to judge, and their replies so far."""

    def __init__(self, items: Sequence[Item], step_timeout_s: float) -> None:
        self.items = items
        self.replies: list[Reply] = [{} for _ in items]
        self.unanswered = len(items)
        self.waiting: deque[int] = deque()
        self.alone: set[int] = set()  # rows that a worker gets one at a time
        self.ends_at: float | None = None
        for row, (_, _, response) in enumerate(items):
            if len(response) > _MAX_RESPONSE_CHARACTERS:
                problem = f"it is too long to judge: over {_MAX_RESPONSE_CHARACTERS} characters"
                self.answer(row, _not_judged(problem))
            else:
                self.waiting.append(row)

    def take(self, most: int) -> list[int]:
        """Rows for one worker: at most so many, and a row of ``alone`` by itself."""
        rows = [self.waiting.popleft()]
        while self.waiting and len(rows) < most:
            if rows[0] in self.alone or self.waiting[0] in self.alone:
                break
            rows.append(self.waiting.popleft())
        return rows

    def answer(self, row: int, reply: Reply) -> None:
        self.replies[row] = reply
        self.unanswered -= 1


def _not_judged(problem: str) -> Reply:
    return {"accuracy": 0.0, "format": 0.0, "problem": problem}
