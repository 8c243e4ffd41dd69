"""The messages between the trainer and its workers.

Requests are pickled: they hold the run's own data, a response only as text. A worker, which may run
foreign code, answers in JSON, a list of replies a line.
"""

import json
import socket
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import first_line
from megatron_rl.rewards.base import Options

_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class PoolSetup:
    """The task of the workers of one pool, whatever it is."""

    plugins: tuple[str, ...]  # loaded by each before anything else

    @property
    def name(self) -> str:
        """For messages."""
        raise NotImplementedError

    def judge(self) -> Any:
        """What answers the items of a pool, by its method ``verify``; called in a worker."""
        raise NotImplementedError


@dataclass(frozen=True)
class WorkerSetup(PoolSetup):
    """The task of the workers of a reward.

    They judge single responses (``verifiers``), or call a function on whole batches.

    Example: ``WorkerSetup(plugins=(), verifiers=("math",), options=options, answer_pattern=None,
    format_pattern="<a>.*</a>")``.
    """

    verifiers: tuple[str, ...]
    options: Options
    answer_pattern: str | None
    format_pattern: str | None
    function: str | None = None
    server: Any = None  # a RewardServerConfig, or None; its imports are not for every worker
    server_limit_s: float = 0.0  # of a call

    @property
    def takes_batches(self) -> bool:
        """Whether responses are given many at a time: to a function or a server."""
        return self.function is not None or self.server is not None

    @property
    def name(self) -> str:
        """For messages: ``reward.verifier = math``."""
        if self.server is not None:
            return f"reward.server.url = {self.server.url}"
        if self.function is not None:
            return f"reward.function = {self.function}"
        return f"reward.verifier = {', '.join(self.verifiers)}"


def send(lane: socket.socket, *replies: dict[str, Any]) -> None:
    lane.sendall(json.dumps(replies).encode("ascii") + b"\n")


def reason(error: BaseException) -> str:
    """Class and message, short. Example: ``ValueError: not a number``."""
    return f"{type(error).__name__}: {first_line(error)}"[:_MAX_REASON_CHARACTERS]
