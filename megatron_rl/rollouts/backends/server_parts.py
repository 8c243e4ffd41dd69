"""What rank 0's backend of servers is made of, and what it says to the main thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.engine.serving.client import ServerClient
from megatron_rl.rollouts.backends.timeouts import RequestTimeouts
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion


class FleetEvent(NamedTuple):
    """Why the main thread is to act before it gets what it waits for.

    Attributes:
        servers: URLs of those that are to get weights, by name.
        version: Which weights; None: those that are published.
        is_settled: Of a run that has no server left: whether the newest weights are all that is
            wanted.
    """

    kind: Literal["join", "starved"]
    servers: Mapping[str, str] = {}
    version: int | None = None
    is_settled: bool = True


class NoServerError(ConnectionError):
    """No server is left."""


class WeightVersionError(ValueError):
    """A response was sampled with other weights than it was asked of."""


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


def stamped(completion: Completion, version: int) -> Completion:
    """Of a paused response, whose server does not say with which weights it was sampled: in
    lockstep those of its request."""
    return Completion(completion.token_ids, completion.sampler_logprobs, False, version)


@dataclass(frozen=True)
class ServerParts:
    """What the backend of servers is made of.

    Attributes:
        connect: A client for a URL.
        switch: Makes the server at a URL use a version that it has staged; raises ConnectionError
            where it does not.
        rewards: Makes the thread that scores responses; it is given what to call, in that thread,
            when some are scored.
        capacity: Requests that a server is sent at a time.
        timeouts: How long one of them may take.
        longest_response: In tokens.
    """

    connect: Callable[[str], ServerClient]
    switch: Callable[[str, int], None]
    rewards: Callable[[Callable[[], None]], RewardThread]
    capacity: int
    timeouts: RequestTimeouts
    longest_response: int
