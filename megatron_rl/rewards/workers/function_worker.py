"""Calls the user's reward function inside its worker, and checks what it returns."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from megatron_rl.plugins import import_function
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.registry import require_two_arguments
from megatron_rl.rewards.workers.messages import WorkerSetup, reason
from megatron_rl.rewards.workers.served import ServedReward

_KEY = "reward.function"


class FunctionJudge:
    """The function, imported once: it keeps its state.

    Raises:
        ValueError: it cannot be imported, it does not take two arguments, or the server of
            ``reward.server`` does not answer.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        # One event loop for all calls: a client of a service keeps its connections.
        self._runner = asyncio.Runner()
        if setup.server is not None:
            served = ServedReward(setup.server, setup.server_limit_s)
            self._runner.run(served.check())
            self._function: Callable[..., Any] = served
            return
        self._function = import_function(str(setup.function), _KEY)
        require_two_arguments(self._function, setup.name, "tasks, responses")

    def verify(self, tasks: Sequence[Task], responses: Sequence[str]) -> dict[str, Any]:
        """``{"scores": [...]}``, one a response, or ``{"problem": ...}`` of the whole call."""
        try:
            returned = self._function(list(tasks), list(responses))
            if inspect.isawaitable(returned):
                returned = self._runner.run(_awaited(returned))
            returned = _in_order(returned)
        except Exception as error:  # noqa: BLE001 - the user's code; the reason is kept
            return {"problem": reason(error)}
        if len(returned) != len(responses):
            counts = f"{len(returned)} rewards for {len(responses)} responses"
            return {"problem": f"ValueError: it returned {counts}"}
        return {"scores": [score(value) for value in returned]}


def _in_order(returned: Any) -> list[Any]:
    """The values of a call. Of a mapping ``list`` would take the keys, and a set has no order."""
    if isinstance(returned, Mapping | Set | str | bytes):
        raise TypeError(f"it returned a {type(returned).__name__}, not a list with one value each")
    return list(returned)


def score(value: Any) -> dict[str, Any]:
    """One returned value as ``{"reward", "accuracy", "parts"}``, or ``{"problem"}``, also of an
    exception in the place of a value.

    Example: ``0.5`` gives ``{"reward": 0.5, "accuracy": 0.0, "parts": {}}``.
    """
    if isinstance(value, BaseException):
        return {"problem": reason(value)}
    try:
        named = dict(value) if isinstance(value, Mapping) else {"reward": value}
        numbers = {}
        for name, number in named.items():
            numbers[str(name)] = _number(str(name), number)
        if "reward" not in numbers:
            raise ValueError(
                f"a mapping without 'reward' (it has {', '.join(numbers) or 'nothing'})"
            )
        reward = numbers.pop("reward")
        accuracy = numbers.pop("accuracy", float(reward == 1))
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy {accuracy} is not within [0, 1]")
        taken = sorted({"format", "function", "verifier_problem"} & set(numbers))
        if taken:
            raise ValueError(
                f"a part called {taken[0]}, which is a part of every reward; choose another name"
            )
    # Whatever a value raises where it is made a number, as 10**400 an OverflowError: it costs this
    # response, not the process.
    except Exception as error:  # noqa: BLE001 - as above
        return {"problem": reason(error)}
    return {"reward": reward, "accuracy": accuracy, "parts": numbers}


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) or value is None:
        raise TypeError(f"{name} is {value!r}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


async def _awaited(value: Any) -> Any:
    return await value
