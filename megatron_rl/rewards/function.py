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
  or is an exception gives its response none. A further call has these alone, up to
  ``reward.num_tries`` calls in all; then ``reward.on_problem`` says what becomes of them: exclude,
  the default, leaves them out of the step. The reason is logged once. The run stops after
  ``_MAX_FAILED_CALLS`` x num_tries calls in a row without one usable value, which together had as
  many responses as that number of its largest calls (a call may be of a single response): it would
  train on nothing.
"""

from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.messages import WorkerSetup
from megatron_rl.rewards.workers.pool import WorkerPool

_MAX_FAILED_CALLS = 3


class FunctionCaller:
    """The function in its process: a pool of one worker, whose items are whole calls."""

    def __init__(self, setup: WorkerSetup, *, timeout_s: float, num_tries: int = 1) -> None:
        self._max_failed_calls = _MAX_FAILED_CALLS * num_tries
        self.pool = WorkerPool(setup, limit=("reward.function_timeout_s", timeout_s))
        self._failed_calls = 0
        self._failed_responses = 0
        self._largest_call = 0

    def __call__(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[dict[str, Any]]:
        """One ``{"reward", "accuracy", "parts"}`` or ``{"problem"}`` a response.

        Raises:
            ValueError: so many calls in a row gave nothing usable; says why the last one did not.
        """
        (outcome,) = self.pool.judge([(list(tasks), list(responses))])
        scores = outcome.get("scores") or [{"problem": outcome["problem"]}] * len(responses)
        problems = [score["problem"] for score in scores if "problem" in score]
        self._largest_call = max(self._largest_call, len(responses))
        if len(problems) < len(scores):
            self._failed_calls = 0
            self._failed_responses = 0
        else:
            self._failed_calls += 1
            self._failed_responses += len(responses)
        enough = self._failed_responses >= self._max_failed_calls * self._largest_call
        if self._failed_calls >= self._max_failed_calls and enough:
            raise ValueError(
                f"{self.pool.setup.name}: {self._failed_calls} calls in a row gave no response a"
                f" reward; the last one: {problems[0]}; correct what it says"
            )
        return scores
