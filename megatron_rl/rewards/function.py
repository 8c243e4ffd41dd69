"""A reward function of the user's own: ``reward.function=path.py:name`` or ``package.module:name``.

::

    from megatron_rl.rewards import Task

    def score(tasks: list[Task], responses: list[str]) -> list[float]:
        return [float(task.answer in response) for task, response in zip(tasks, responses)]

It is called while responses are generated, by one call after the other: each has all responses of
this rank that have ended since the last, so the value of a response must not depend on the others.
``tasks[i]`` is the prompt of ``responses[i]``. It returns one value a response: a number, or a
mapping with ``reward``, optionally ``accuracy`` in [0, 1], and any further numbers, which are
logged as ``reward/part/NAME``. It may be ``async def``.

- The reward has the user's scale. It replaces the verifier: total = accuracy_weight x reward +
  format_weight x format.
- A response is *correct* when its accuracy is 1. Without ``accuracy`` that is when the reward is
  exactly 1. Methods that ask for correct responses (dynamic sampling, pass@k, APO, ...) need this;
  a scale that never gives 1 has to say ``accuracy``.
- Methods that need rewards in [0, 1] (MAPO, and estimators ``tree``, ``apd``) stop at the first
  reward outside.
- It runs in a process of its own, one for each rank, which lives as long as the run: module state,
  clients and caches are kept between calls. What it prints goes where the run's output goes. It is
  the user's own code: nothing but its time is limited.
- A call that raises, returns the wrong number of values or takes longer than
  ``reward.function_timeout_s`` gives its responses no verdict; a value that is not a finite number
  gives its response none. ``reward.on_problem`` says what becomes of them; exclude, the default,
  leaves them out of the step. The reason is logged once. The run stops
  after ``_MAX_FAILED_CALLS`` calls in a row without one usable value, which together had as many
  responses as that number of its largest calls (a call may be of a single response): it would
  train on nothing.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.messages import WorkerSetup
from megatron_rl.rewards.workers.server import Lane, WorkerServer

_START_TIMEOUT_S = 600.0  # its import may load a model
_MAX_FAILED_CALLS = 3


class FunctionCaller:
    """The trainer's end of the process in which the function lives.

    ``restarts`` counts how often that process was killed or died.
    """

    def __init__(self, setup: WorkerSetup, *, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._server = WorkerServer(setup)
        self._lane: Lane | None = None
        self._failed_calls = 0
        self._failed_responses = 0
        self._largest_call = 0
        self.restarts = 0

    def start(self) -> None:
        """Starts the process in the background."""
        if self._lane is None:
            self._lane = self._server.lane()

    def wait_until_ready(self) -> None:
        """Returns when the function is imported.

        Raises:
            ValueError: it cannot be imported, or does not take two arguments.
            RuntimeError: its process dies while importing, or is not ready within
                ``_START_TIMEOUT_S``.
        """
        ends_at = time.monotonic() + _START_TIMEOUT_S
        while True:
            self.start()
            assert self._lane is not None
            if self._lane.ready:
                return
            reply = self._reply(self._lane, ends_at)
            if reply is None and time.monotonic() >= ends_at:
                raise RuntimeError(
                    f"reward.function = {self._setup.function}: not imported within "
                    f"{_START_TIMEOUT_S:g} s"
                )
            if reply is None:
                self._drop()
                if self.restarts >= _MAX_FAILED_CALLS:
                    raise RuntimeError(
                        f"reward.function = {self._setup.function}: its process dies while "
                        "importing it"
                    )

    def __call__(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[dict[str, Any]]:
        """One ``{"reward", "accuracy", "parts"}`` or ``{"problem"}`` a response.

        Raises:
            ValueError: so many calls in a row gave nothing usable; says why the last one did not.
        """
        outcome = self._call(tasks, responses)
        scores = outcome.get("scores") or [{"problem": outcome["problem"]}] * len(responses)
        problems = [score["problem"] for score in scores if "problem" in score]
        self._largest_call = max(self._largest_call, len(responses))
        if len(problems) < len(scores):
            self._failed_calls = 0
            self._failed_responses = 0
        else:
            self._failed_calls += 1
            self._failed_responses += len(responses)
        enough = self._failed_responses >= _MAX_FAILED_CALLS * self._largest_call
        if self._failed_calls >= _MAX_FAILED_CALLS and enough:
            raise ValueError(
                f"reward.function = {self._setup.function}: {self._failed_calls} calls in a row "
                f"gave no response a reward; the last one: {problems[0]}; fix the function"
            )
        return scores

    def close(self) -> None:
        if self._lane is not None:
            self._drop()
        self._server.close()

    def _call(self, tasks: Sequence[Task], responses: Sequence[str]) -> dict[str, Any]:
        self.wait_until_ready()
        assert self._lane is not None
        self._lane.queue((list(tasks), list(responses)))
        began = time.monotonic()
        reply = self._reply(self._lane, began + self._timeout_s)
        if reply is not None:
            return reply
        self._drop()
        if time.monotonic() - began >= self._timeout_s:
            limit = f"reward.function_timeout_s = {self._timeout_s:g} s"
            return {"problem": f"no rewards within {limit}"}
        return {"problem": "its process died"}

    def _reply(self, lane: Lane, ends_at: float) -> dict[str, Any] | None:
        """The next reply that is not the pid; None when the process is gone or time is up."""
        while (now := time.monotonic()) < ends_at:
            if not lane.write():
                return None
            _wait_for(lane, ends_at - now)
            replies = lane.read()
            if replies is None:
                return None
            for reply in replies:
                if "refused" in reply:
                    raise ValueError(reply["refused"])
                if "pid" in reply:
                    lane.pid = reply["pid"]
                    continue
                if "ready" in reply:
                    lane.ready = True
                    self._server.works()
                return reply
        return None

    def _drop(self) -> None:
        assert self._lane is not None
        self._lane.kill()
        self._lane = None
        self.restarts += 1
        self._server.is_gone()


def _wait_for(lane: Lane, seconds: float) -> None:
    """Until the lane can be read, or written where something is left to write, or time is up.

    Not ``select.select``, which takes no descriptor above 1023: a trainer may have more files open.
    """
    events = selectors.EVENT_READ
    if lane.wants_to_write:
        events |= selectors.EVENT_WRITE
    with selectors.DefaultSelector() as selector:
        selector.register(lane.sock, events)
        selector.select(seconds)
