"""What rank 0's dispatcher of servers is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from megatron_rl.rollouts.patience import Patience
from megatron_rl.rollouts.prompt_stream import PromptStream
from megatron_rl.runtime.registry import Registration
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Image, Prompt, Sampling, Score


class Client(Protocol):
    """Requests to one server; see ``engine.client.ServerClient``."""

    async def generate(self, prompt: Prompt, sampling: Sampling, response: int) -> Completion: ...

    async def score(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[float]: ...

    async def close(self) -> None: ...


class Servers(Protocol):
    """The servers that want to take part; see ``runtime.registry.Registry``."""

    def look(self) -> Mapping[str, Registration]: ...

    def remove(self, name: str) -> None: ...


class News(NamedTuple):
    """Why ``wait`` returns. ``servers``: URLs of those that are to get weights, by name;
    ``version``: which weights; None: those that are published."""

    kind: Literal["join", "starved"]
    servers: Mapping[str, str] = {}
    version: int | None = None


class NoServerError(ConnectionError):
    """Nobody is left to ask."""


class WeightVersionError(ValueError):
    """A response was sampled with other weights than was said."""


def check_versions(request: Request, completion: Completion, *, exact: bool) -> None:
    """``exact``: in lockstep. Raises WeightVersionError."""
    versions = [span.version for span in completion.spans]
    wrong = versions != [request.version] if exact else min(versions) < request.version
    if wrong:
        raise WeightVersionError(
            f"a response that was to be sampled with weights version {request.version}"
            f"{'' if exact else ' or newer'} comes from {versions}; another program may have"
            " sent weights to a server of this run"
        )


@dataclass(frozen=True)
class Tasks:
    """What the dispatcher is given to do. ``prompts``: by group; ``sampling``: of a step, counted
    from 0, a prompt, and a version of the weights; ``judge``: the verdicts on answers, each to the
    prompt at its place, in a thread of its own; ``wants``: whether the method learns from a group;
    ``connect``: a client for a URL; ``lost``: which errors mean that a server is gone;
    ``unreachable``: which of these, that it was gone before it was asked; ``failed``: which of
    these, that it goes on, and failed at a request; ``switch``: makes the server at a URL go over
    to a version that it has staged, and raises ConnectionError where it does not; ``capacity``:
    requests that a server is sent at a time; ``patience``: how long one of them may take;
    ``longest_response``: tokens."""

    prompts: PromptStream
    sampling: Callable[[int, Prompt, int], Sampling]
    judge: Callable[[Sequence[Prompt], Sequence[Completion]], Sequence[Score]]
    wants: Callable[[Sequence[Score]], bool]
    connect: Callable[[str], Client]
    lost: type[Exception]
    unreachable: type[Exception]
    failed: type[Exception]
    switch: Callable[[str, int], None]
    capacity: int
    patience: Patience
    longest_response: int
