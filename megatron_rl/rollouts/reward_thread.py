"""Batched calls in a thread, such as those of rewards, so that no engine waits for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from megatron_rl.protocols import Reward
from megatron_rl.rollouts.environments.outcomes import Outcome, last_turn
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatchThread(Generic[Item, Result]):
    """Works on items in a thread of this process, in the order they are given.

    One call at a time; the next gets all items that have come meanwhile, so that a ``work`` that
    is faster on many items at once gets many.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], list[Result]],
        name: str,
        *,
        at_most: int | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``at_most``: items in a call; ``wake``: called by the thread when a call has ended."""
        self._work = work
        self._at_most = at_most
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: list[Item] = []
        self._call: Future[list[Result]] | None = None

    def add(self, item: Item) -> None:
        self._waiting.append(item)

    @property
    def is_due(self) -> bool:
        """Whether no call is running, and the next ``take`` begins one."""
        return self._call is None and bool(self._waiting)

    def take(self) -> list[Result]:
        """The results that are there. Raises what a call has raised."""
        results: list[Result] = []
        if self._call is not None and self._call.done():
            results = self._call.result()
            self._call = None
        if self._call is None and self._waiting:
            size = len(self._waiting) if self._at_most is None else self._at_most
            self._call = self._thread.submit(self._work, self._waiting[:size])
            del self._waiting[:size]
            if (wake := self._wake) is not None:
                self._call.add_done_callback(lambda _: wake())
        return results

    def forget(self) -> None:
        """Drops items, and the results of a running call, which ends before the next begins."""
        self._waiting = []
        self._call = None

    def close(self) -> None:
        """Waits for the running call."""
        self._wake = None
        self._thread.shutdown()


class Unscored(NamedTuple):
    """A response that waits for its score. ``outcome``: that of its environment, which may hold
    the score."""

    request: Request
    prompt: Prompt
    completion: Completion
    outcome: Outcome | None = None


class RewardThread(BatchThread[Unscored, tuple[Unscored, Score]]):
    """Scores responses in a thread of this process; ``reward.step_timeout_s`` bounds one call.

    Of a response with several turns the reward is given the text of the last one.
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
        super().__init__(self._score, "reward", at_most=at_most, wake=wake)
        self._reward = reward
        self._decode = decode

    def give(
        self,
        request: Request,
        prompt: Prompt,
        completion: Completion,
        outcome: Outcome | None = None,
    ) -> None:
        self.add(Unscored(request, prompt, completion, outcome))

    def _score(self, responses: Sequence[Unscored]) -> list[tuple[Unscored, Score]]:
        known = [None if one.outcome is None else one.outcome.score for one in responses]
        judged = [one for one, score in zip(responses, known, strict=True) if score is None]
        texts = [self._decode(last_turn(one.completion)) for one in judged]
        truncated = [one.completion.truncated for one in judged]
        prompts = [one.prompt for one in judged]
        scores = iter(self._reward.score(prompts, texts, truncated) if judged else ())
        found = []
        for one, by_environment in zip(responses, known, strict=True):
            score = next(scores) if by_environment is None else by_environment
            if one.outcome is not None:
                score = replace(score, environment=one.outcome.facts)
            found.append((one, score))
        return found
