"""Environments by name: what answers a response when it has ended a turn.

A plug-in (``--plugin my_environment.py``) adds one like this; it is then ``env.name=echo``::

    from megatron_rl.rollouts.environments.base import Done, Environment, register_environment

    @register_environment("echo")
    class Echo(Environment):
        def step(self, text, seed):
            return Done() if "stop" in text else f"You said: {text}"

Nothing here imports torch: environments live in worker processes, which must start quickly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_rl.errors import RegistrationError, close_names, did_you_mean
from megatron_rl.rewards.base import Task

Message = Mapping[str, str]  # of a chat template: role and content


@dataclass(frozen=True)
class Done:
    """A response is complete. ``reward``: None: the reward of the run judges its last turn.
    ``parts``: further numbers, logged as ``reward/part/NAME``; ``accuracy`` in [0, 1] says whether
    it is correct (else it is when the reward is 1).

    Example: ``Done(1.0, {"guesses": 3.0})``.
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class ToolFailure(Exception):
    """Raised by a tool that has itself failed, such as one whose server is gone: the response then
    has no verdict (``reward.on_problem``). Any other exception is shown to the model, as an error
    of its call."""


@dataclass(frozen=True)
class EnvironmentSettings:
    """What an ``Environment`` may read of the configuration.

    Example: ``EnvironmentSettings("tools", ("calculator",), timeout_s=10.0, memory_bytes=1 << 30,
    max_message_characters=2000, sandbox="bubblewrap")``.
    """

    name: str
    tools: tuple[str, ...]
    timeout_s: float
    memory_bytes: int
    max_message_characters: int
    sandbox: str
    servers: tuple[str, ...] = ()
    corpus: str = ""
    agent: str | None = None
    max_turns: int | None = None  # of a response; None: any number


class Environment:
    """One response to one prompt, in a worker process. Subclasses must define ``step`` alone.

    It must be a function of the prompt, of the seeds and of the texts: after a crash, or in another
    worker, it is made anew and given the same turns again.
    """

    # ``step`` depends on the turns before; else it is given the last one alone.
    remembers = True

    # ``Done`` brings a reward: a response that a limit has ended then has 0, and no verifier is
    # needed. Else the reward of the run judges every response.
    gives_reward = False
    # The texts of the turns before the one that ``step`` is given.
    earlier: Sequence[str] = ()
    # Starts processes of its own, which the kernel denies to other environments.
    starts_processes = False

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.settings = settings

    @classmethod
    def functions(
        cls, settings: EnvironmentSettings
    ) -> Sequence[Callable[..., Any] | Mapping[str, Any]]:
        """Tools that the chat template shows to the model; a mapping is the schema of one."""
        return ()

    @classmethod
    def num_calls(cls, text: str) -> int:
        """Tool calls in a turn; for metrics."""
        return 0

    @classmethod
    def refusal(cls, settings: EnvironmentSettings) -> str | None:
        """Why it cannot work on this machine; None where it can."""
        return None

    @classmethod
    def prepare(cls, settings: EnvironmentSettings) -> None:
        """Called once, in the process that the workers are forked from, for work that would cost
        each of them time. It must start no thread and keep no connection."""

    def start(self, task: Task, seed: int) -> None:
        """Called before the first turn. ``seed``: of the run, the prompt and the response."""

    def step(self, text: str, seed: int) -> str | Sequence[Message] | Done:
        """What follows a turn: the content of a message of the user, several messages, or the end.
        It may be ``async def``, as ``start`` and tools may.

        Args:
            text: What the model has sampled in this turn, without special tokens.
            seed: Of the run, the prompt, the response and the turn.

        An exception leaves the response without a verdict (``reward.on_problem``).
        """
        raise NotImplementedError


_classes: dict[str, type[Environment]] = {}
Class = TypeVar("Class", bound=type[Environment])


def register_environment(name: str) -> Callable[[Class], Class]:
    """Decorator of a class derived from ``Environment``. Raises RegistrationError where the name is
    taken."""

    def register(made: Class) -> Class:
        taken = _classes.get(name)
        # A plug-in that is loaded again registers the same class anew.
        if name == "single" or (taken is not None and taken.__qualname__ != made.__qualname__):
            raise RegistrationError(f"register_environment({name!r}): is taken; choose another")
        _classes[name] = made
        return made

    return register


def environment_class(name: str) -> type[Environment]:
    """The class registered under ``name``. Raises ValueError when there is none."""
    if name in _classes:
        return _classes[name]
    there = ["single", *sorted(_classes)]
    hint = did_you_mean(close_names(name, there, count=2))
    raise ValueError(
        f"env.name = {name}: no such environment; there are {', '.join(there)}, and those that a"
        f" --plugin registers{'; ' if hint else ''}{hint}"
    )
