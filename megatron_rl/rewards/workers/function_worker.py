"""Calls the user's reward function inside its worker.

The function is imported once and keeps its state; what it returns is checked.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.plugins import import_function, load_plugins
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.messages import WorkerSetup, read_frame, reason, refuse, send

_KEY = "reward.function"


def serve_function(lane: socket.socket, setup: WorkerSetup) -> int:
    """Answers batches until the trainer closes the lane; returns the exit code."""
    try:
        load_plugins(setup.plugins)
        function = _imported(str(setup.function))
    except ValueError as error:
        return refuse(lane, str(error))
    send(lane, {"ready": True})
    # One event loop for all calls: a client of a service keeps its connections.
    with asyncio.Runner() as runner:
        while (frame := read_frame(lane)) is not None:
            tasks, responses = pickle.loads(frame)
            send(lane, _call(function, tasks, responses, runner))
            sys.stdout.flush()
    return 0


def _imported(spec: str) -> Callable[..., Any]:
    """The function ``spec`` names.

    Raises:
        ValueError: it cannot be imported, is not a function, or does not take two arguments.
    """
    function = import_function(spec, _KEY)
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise ValueError(
            f"{_KEY} = {spec}: cannot be called as function(tasks, responses) ({error}); give it"
            " these two"
        ) from error
    except ValueError:
        return function  # written in C: without a signature there is nothing to check
    return function


def _call(
    function: Callable[..., Any],
    tasks: Sequence[Task],
    responses: Sequence[str],
    runner: asyncio.Runner,
) -> dict[str, Any]:
    """``{"scores": [...]}``, one a response, or ``{"problem": ...}`` of the whole call."""
    try:
        returned = function(list(tasks), list(responses))
        if inspect.isawaitable(returned):
            returned = runner.run(_awaited(returned))
        returned = list(returned)
    except Exception as error:  # noqa: BLE001 - the user's code; the reason is kept
        return {"problem": reason(error)}
    if len(returned) != len(responses):
        counts = f"{len(returned)} rewards for {len(responses)} responses"
        return {"problem": f"ValueError: it returned {counts}"}
    return {"scores": [score(value) for value in returned]}


def score(value: Any) -> dict[str, Any]:
    """One returned value as ``{"reward", "accuracy", "parts"}``, or ``{"problem"}``.

    Example: ``0.5`` gives ``{"reward": 0.5, "accuracy": 0.0, "parts": {}}``.
    """
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
