"""Judging responses in worker processes, within limits that hold whatever the responses are.

A response that cannot be judged within ``reward.timeout_s`` is stopped by a timer inside its
worker; where even that does not ring (one huge power is one instruction) the worker's process group
is killed after a second more. So a batch of n hostile responses would take n x timeout / workers.
``reward.step_timeout_s`` bounds that sum: when it is used up, what has no verdict counts as not
judged. Honest answers take milliseconds, and are not lost as long as not every worker is held up by
a hostile one.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rewards.messages import Setup
from megatron_rl.rewards.server import Lane, Server
from megatron_rl.rewards.verdict import Task

LOGGER = logging.getLogger(__name__)
GRACE_S = 1.0  # the worker's own timer is the first to act
START_TIMEOUT_S = 120.0
# A longer response is not judged: a part of it could have another answer.
MAX_RESPONSE_CHARACTERS = 1_000_000
MAX_CHUNK = 32

Item = tuple[str | None, Task, str]  # verifier (None: only the format is wanted), task, response
Reply = dict[str, Any]


@dataclass
class Work:
    """What a worker is busy with: rows it has not answered, in order, and when it gave the last
    sign of life."""

    rows: deque[int] = field(default_factory=deque)
    since: float = 0.0


class WorkerPool:
    """``num_workers`` workers of one server. ``restarts`` counts the workers that were lost or
    killed."""

    def __init__(self, setup: Setup, *, num_workers: int, step_timeout_s: float) -> None:
        self._setup, self._num_workers, self._step_timeout_s = setup, num_workers, step_timeout_s
        self._server = Server(setup)
        self._work: dict[Lane, Work] = {}
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.restarts = 0

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the verifiers its workers have."""
        return self._setup.verifiers

    def start(self) -> None:
        """Begins to start the workers and does not wait for them: their imports run beside what the
        trainer builds."""
        while len(self._work) < self._num_workers:
            self._add_lane()

    def close(self) -> None:
        """Ends all workers."""
        for lane in list(self._work):
            self._drop(lane)
        self._server.close()

    def judge(self, items: Sequence[Item]) -> list[Reply]:
        """One reply an item (``accuracy``, ``format``, ``problem``), after at most
        ``step_timeout_s`` and a second.

        Raises:
            ValueError: the workers cannot import a plug-in.
            RuntimeError: the workers cannot be started.
        """
        self.start()
        batch = Batch(items, self._step_timeout_s)
        waiting_since = time.monotonic()
        while batch.unanswered:
            now = time.monotonic()
            if batch.ends_at is None and any(lane.ready for lane in self._work):
                batch.ends_at = now + self._step_timeout_s  # the time of a start is not the batch's
            if batch.ends_at is None and now > waiting_since + START_TIMEOUT_S:
                raise RuntimeError(
                    f"no worker of the verifiers was ready within {START_TIMEOUT_S:g} s"
                )
            if batch.ends_at is not None and now > batch.ends_at:
                self._give_up(batch)
                break
            self._hand_out(batch, now)
            self._exchange(batch, self._patience(batch, now))
            self._stop_overdue(batch)
        return batch.replies

    def _hand_out(self, batch: Batch, now: float) -> None:
        share = min(MAX_CHUNK, -(-len(batch.waiting) // self._num_workers))
        for lane, work in self._work.items():
            if lane.ready and not work.rows and batch.waiting:
                work.rows.extend(batch.take(share))
                work.since = now
                lane.queue([batch.items[row] for row in work.rows])

    def _exchange(self, batch: Batch, patience_s: float) -> None:
        """Writes and reads what is possible now; waits for something to be possible, for
        ``patience_s`` at most."""
        for lane in list(self._work):
            if lane.wants_to_write and not lane.write():
                self._lost(lane, batch)
        for lane in self._work:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.wants_to_write else 0)
            self._selector.modify(lane.sock, events, lane)
        for key, _ in self._selector.select(patience_s):
            lane = key.data
            replies = lane.read()
            if replies is None:
                self._lost(lane, batch)
            for reply in replies or ():
                self._take(lane, reply, batch)

    def _take(self, lane: Lane, reply: Reply, batch: Batch) -> None:
        work = self._work[lane]
        work.since = time.monotonic()
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
                batch.waiting.extendleft(reversed(work.rows))  # they were not begun
                self._replace(lane)

    def _lost(self, lane: Lane, batch: Batch) -> None:
        """The worker ended by itself, or was killed by somebody else."""
        self._return(lane, batch, "the process that judged it died")

    def _stop_overdue(self, batch: Batch) -> None:
        limit_s = self._setup.options.timeout_s
        now = time.monotonic()
        for lane, work in list(self._work.items()):
            if work.rows and now > work.since + limit_s + GRACE_S:
                self._return(
                    lane,
                    batch,
                    f"no verdict within reward.timeout_s = {limit_s:g} s, and its worker had to "
                    "be killed",
                )

    def _return(self, lane: Lane, batch: Batch, problem: str) -> None:
        """Another worker takes the place of this one. Which of several responses it was at is not
        known, because verdicts are sent some at a time: they are all given out again, one by
        one."""
        rows = self._work[lane].rows
        if len(rows) == 1:
            batch.answer(rows[0], not_judged(problem))
        else:
            batch.alone.update(rows)
            batch.waiting.extendleft(reversed(rows))
        self._replace(lane)

    def _give_up(self, batch: Batch) -> None:
        for lane, work in list(self._work.items()):
            if work.rows:
                self._replace(lane)
        problem = f"reward.step_timeout_s = {self._step_timeout_s:g} s was used up before its turn"
        for row, reply in enumerate(batch.replies):
            if not reply:
                batch.answer(row, not_judged(problem))

    def _patience(self, batch: Batch, now: float) -> float:
        """Seconds until the next limit."""
        ends = [now + 1.0 if batch.ends_at is None else batch.ends_at]
        ends += [
            work.since + self._setup.options.timeout_s + GRACE_S
            for work in self._work.values()
            if work.rows
        ]
        return max(0.0, min(ends) - now + 0.001)

    def _replace(self, lane: Lane) -> None:
        self._drop(lane)
        self.restarts += 1
        self._server.is_gone()  # then the next lane starts another one
        self._add_lane()

    def _add_lane(self) -> None:
        lane = self._server.lane()
        self._work[lane] = Work()
        self._selector.register(lane.sock, selectors.EVENT_READ, lane)

    def _drop(self, lane: Lane) -> None:
        self._selector.unregister(lane.sock)
        del self._work[lane]
        lane.kill()


class Batch:
    """Items and what is known of them."""

    def __init__(self, items: Sequence[Item], step_timeout_s: float) -> None:
        self.items = items
        self.replies: list[Reply] = [{} for _ in items]
        self.unanswered = len(items)
        self.waiting: deque[int] = deque()
        self.alone: set[int] = set()  # rows that a worker gets one at a time
        self.ends_at: float | None = None
        for row, (_, _, response) in enumerate(items):
            if len(response) > MAX_RESPONSE_CHARACTERS:
                problem = f"it is too long to judge: over {MAX_RESPONSE_CHARACTERS} characters"
                self.answer(row, not_judged(problem))
            else:
                self.waiting.append(row)

    def take(self, most: int) -> list[int]:
        """Rows for one worker."""
        rows = [self.waiting.popleft()]
        while (
            self.waiting
            and len(rows) < most
            and not self.alone.intersection((rows[0], self.waiting[0]))
        ):
            rows.append(self.waiting.popleft())
        return rows

    def answer(self, row: int, reply: Reply) -> None:
        self.replies[row] = reply
        self.unanswered -= 1


def not_judged(problem: str) -> Reply:
    return {"accuracy": 0.0, "format": 0.0, "problem": problem}
