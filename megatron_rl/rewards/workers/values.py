"""What a user's code returns in a worker, and checks of its values for a response."""

import asyncio
import inspect
import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards.workers.messages import reason


def score(value: Any) -> dict[str, Any]:
    """One returned value as ``{"reward", "accuracy", "parts"}``, or ``{"problem"}``, also of an
    exception in the place of a value.

    Example: ``0.5`` gives ``{"reward": 0.5, "accuracy": 0.0, "parts": {}}``.
    """
    if isinstance(value, BaseException):
        return {"problem": reason(value)}
    try:
        named = dict(value) if isinstance(value, Mapping) else {"reward": value}
        numbers = {str(name): _number(str(name), number) for name, number in named.items()}
        if "reward" not in numbers:
            raise ValueError(
                f"a mapping without 'reward' (it has {', '.join(numbers) or 'nothing'})"
            )
        reward = numbers.pop("reward")
        accuracy = numbers.pop("accuracy", float(reward == 1))
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy {accuracy} is not within [0, 1]")
        taken = sorted({"format", "function", "verifier_problem", "verifier_tries"} & set(numbers))
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


_RUNNER = asyncio.Runner()  # its event loop is made by the first call, in a worker


def await_value(value: Any) -> Any:
    """What an awaitable gives, by the one event loop of this process, in which a client keeps its
    connections; any other value as it is."""
    return _RUNNER.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
