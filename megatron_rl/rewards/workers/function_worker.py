"""Calls the user's reward function inside its worker, and checks what it returns."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from megatron_rl.plugins import import_function
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.registry import require_two_arguments
from megatron_rl.rewards.workers.messages import WorkerSetup, reason
from megatron_rl.rewards.workers.served import ServedReward
from megatron_rl.rewards.workers.values import await_value, score


class FunctionJudge:
    """The function, imported once: it keeps its state.

    Raises:
        ValueError: it cannot be imported, it does not take two arguments, or the server of
            ``reward.server`` does not answer.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        if setup.server is not None:
            served = ServedReward(setup.server, setup.server_limit_s)
            await_value(served.check())
            self._function: Callable[..., Any] = served
            return
        self._function = import_function(str(setup.function), "reward.function")
        require_two_arguments(self._function, setup.name, "tasks, responses")

    def verify(self, tasks: Sequence[Task], responses: Sequence[str]) -> dict[str, Any]:
        """``{"scores": [...]}``, one a response, or ``{"problem": ...}`` of the whole call."""
        try:
            returned = await_value(self._function(list(tasks), list(responses)))
            # Of a mapping ``list`` would take the keys, and a set has no order.
            if isinstance(returned, Mapping | Set | str | bytes):
                kind = type(returned).__name__
                raise TypeError(f"it returned a {kind}, not a list with one value each")
            returned = list(returned)
        except Exception as error:  # noqa: BLE001 - the user's code; the reason is kept
            return {"problem": reason(error)}
        if len(returned) != len(responses):
            counts = f"{len(returned)} rewards for {len(responses)} responses"
            return {"problem": f"ValueError: it returned {counts}"}
        return {"scores": [score(value) for value in returned]}
