"""Episodes inside a worker: environments that are given the turns of their responses."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megatron_rl.rollouts.environments.agent
import megatron_rl.rollouts.environments.tools  # noqa: F401 (both register the package's own)
from megatron_rl.rewards.base import Task
from megatron_rl.rewards.workers.messages import PoolSetup
from megatron_rl.rewards.workers.response_verifier import WorkerLimits, seed_libraries
from megatron_rl.rewards.workers.values import await_value, score
from megatron_rl.rollouts.environments.base import (
    Done,
    Environment,
    EnvironmentSettings,
    ToolFailure,
    environment_class,
)

_MOST_OPEN = 256  # environments that a worker keeps; others are made again from their turns
# Limits of one answer: what is sent to the trainer and rendered there must stay small.
_MOST_ITEMS = 64  # messages, or parts of a reward
_MOST_NAME = 100  # characters of the name of a tool or a part
_ROLES = ("tool", "user")


@dataclass(frozen=True)
class EpisodeSetup(PoolSetup):
    """The task of the workers of an environment."""

    settings: EnvironmentSettings

    @property
    def name(self) -> str:
        return f"env.name = {self.settings.name}"

    def judge(self) -> Episodes:
        environment_class(self.settings.name).prepare(self.settings)
        return Episodes(self.settings)


class Episodes:
    """The environments of one worker, each with the turns that it has seen.

    What is kept only saves time: an item has all turns of its response, so that any worker answers
    alike, also one that replaces another.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._class = environment_class(settings.name)
        self._open: OrderedDict[tuple[str, int], tuple[list[str], Environment]] = OrderedDict()
        limits = (settings.timeout_s, settings.memory_bytes, self._class.starts_processes)
        # After the failure of a tool this worker ends, and another one connects anew.
        self._limits = WorkerLimits("env", *limits, fatal=(ToolFailure,))

    def verify(self, task: Task, seed: int, turns: Sequence[str]) -> dict[str, Any]:
        """What follows the last turn: ``messages``, ``done`` (``reward``, ``accuracy`` and
        ``parts``, or empty where it gives no reward), or ``problem``; ``last`` as of
        ``ResponseVerifier.verify``. ``turns``: all texts so far."""
        answer: dict[str, Any] = {}
        return (
            self._limits.problem_of(lambda: answer.update(self._answer(task, seed, turns)))
            or answer
        )

    def _answer(self, task: Task, seed: int, turns: Sequence[str]) -> dict[str, Any]:
        key = (task.uid, seed)
        # Taken out: one that fails in the middle is not used again.
        seen, environment = self._open.pop(key, ([], None))
        if environment is None or list(turns[: len(seen)]) != seen or len(seen) == len(turns):
            # An environment that remembers nothing needs none of the turns before the last.
            seen = [] if self._class.remembers else list(turns[:-1])
            environment = self._class(self._settings)
            seed_libraries(seed)
            await_value(environment.start(task, seed))
        said: Any = None
        for number in range(len(seen), len(turns)):
            of_turn = turn_seed(seed, number)
            seed_libraries(of_turn)
            environment.earlier = turns[:number]
            said = await_value(environment.step(turns[number], of_turn))
        if isinstance(said, Done):
            return {"done": _verdict(said)}
        self._open[key] = (list(turns), environment)
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return {"messages": self._messages(said)}

    def _messages(self, said: Any) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        if not messages:
            raise ValueError("step returned no message; return a text, messages or Done")
        if len(messages) > _MOST_ITEMS:
            raise ValueError(f"step returned {len(messages)} messages; at most {_MOST_ITEMS}")
        for message in messages:
            if message["role"] not in _ROLES or not isinstance(message["content"], str):
                raise ValueError(
                    f"a message of the role {message['role']!r} and a content of the type"
                    f" {type(message['content']).__name__}; give a text of tool or user"
                )
        most = self._settings.max_message_characters
        return [
            {
                "role": one["role"],
                "name": _encodable(str(one.get("name", one["role"]))[:_MOST_NAME]),
                "content": _encodable(shortened(one["content"], most)),
            }
            for one in messages
        ]


def _encodable(text: str) -> str:
    """``text`` with a ? in place of lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _verdict(done: Done) -> dict[str, Any]:
    if done.reward is None:
        return {}
    if len(done.parts) > _MOST_ITEMS or any(len(str(name)) > _MOST_NAME for name in done.parts):
        raise ValueError(
            f"Done has {len(done.parts)} parts; at most {_MOST_ITEMS}, with names of at most"
            f" {_MOST_NAME} characters"
        )
    value = score({**done.parts, "reward": done.reward})
    if "problem" in value:
        raise ValueError(value["problem"])
    return value


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters of a text, from both of its ends, and how many are left out.

    Example: ``shortened("abcdefgh", 4)`` is ``"ab\\n[4 characters left out]\\ngh"``.
    """
    if len(text) <= most:
        return text
    end = most // 2
    left_out = len(text) - most
    return f"{text[: most - end]}\n[{left_out} characters left out]\n{text[len(text) - end :]}"


def turn_seed(seed: int, turn: int) -> int:
    """Seed of the environment in one turn, counted from 0."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
