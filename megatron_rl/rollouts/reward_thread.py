"""Rewards while others generate: no engine waits for a slow verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from megatron_rl.protocols import Reward
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score


class Unscored(NamedTuple):
    """A response that waits for its score."""

    request: Request
    prompt: Prompt
    completion: Completion


Scores = list[tuple[Unscored, Score]]


class RewardThread:
    """Scores responses in a thread of this process, in the order they are given.

    One call of the reward at a time; the next gets all that has come meanwhile. So a reward that
    takes many responses at once has them, and ``reward.step_timeout_s`` bounds one such call.
    """

    def __init__(
        self,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        *,
        at_most: int | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``at_most``: responses in a call; ``wake``: called by the thread when some are scored."""
        self._reward = reward
        self._decode = decode
        self._at_most = at_most
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._waiting: list[Unscored] = []
        self._call: Future[Scores] | None = None

    def give(self, request: Request, prompt: Prompt, completion: Completion) -> None:
        self._waiting.append(Unscored(request, prompt, completion))

    def take(self) -> Scores:
        """The scores that are there. Raises what the reward has raised."""
        scores: Scores = []
        if self._call is not None and self._call.done():
            scores = self._call.result()
            self._call = None
        if self._call is None and self._waiting:
            size = len(self._waiting) if self._at_most is None else self._at_most
            self._call = self._thread.submit(self._score, self._waiting[:size])
            del self._waiting[:size]
            if (wake := self._wake) is not None:
                self._call.add_done_callback(lambda _: wake())
        return scores

    def forget(self) -> None:
        """Drops what is not scored yet. A call that is at work ends by itself, and another begins
        after it."""
        self._waiting = []
        self._call = None

    def close(self) -> None:
        """Waits for the call that is at work."""
        self._wake = None
        self._thread.shutdown()

    def _score(self, responses: Sequence[Unscored]) -> Scores:
        texts = [self._decode(list(one.completion.token_ids)) for one in responses]
        truncated = [one.completion.truncated for one in responses]
        scores = self._reward.score([one.prompt for one in responses], texts, truncated)
        return list(zip(responses, scores, strict=True))
