"""Verdicts while others generate: a slow verifier keeps nobody from sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_rl.protocols import Reward
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score

Judged = list[tuple[Request, Score]]


class Judge:
    """Scores responses in a thread of this process, in the order they are given.

    One call of the reward at a time; the next gets all that has come meanwhile. So a reward that
    takes many responses at once has them, and ``reward.step_timeout_s`` bounds one such call.
    """

    def __init__(self, reward: Reward, decode: Callable[[Sequence[int]], str]) -> None:
        self._reward = reward
        self._decode = decode
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._waiting: list[tuple[Request, Prompt, Completion]] = []
        self._call: Future[Judged] | None = None

    def give(self, request: Request, prompt: Prompt, completion: Completion) -> None:
        self._waiting.append((request, prompt, completion))

    def take(self) -> Judged:
        """The verdicts that are there. Raises what the reward has raised."""
        judged: Judged = []
        if self._call is not None and self._call.done():
            judged = self._call.result()
            self._call = None
        if self._call is None and self._waiting:
            self._call = self._thread.submit(self._judge, self._waiting)
            self._waiting = []
        return judged

    def forget(self) -> None:
        """Nobody asks for what is not judged yet. A call that is at work ends by itself, and
        another begins after it."""
        self._waiting = []
        self._call = None

    def _judge(self, responses: Sequence[tuple[Request, Prompt, Completion]]) -> Judged:
        requests, prompts, completions = zip(*responses, strict=True)
        scores = verdicts(self._reward, self._decode, prompts, completions)
        return list(zip(requests, scores, strict=True))


def verdicts(
    reward: Reward,
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
) -> list[Score]:
    """What the reward says of each completion, to the prompt at its place."""
    texts = [decode(list(completion.token_ids)) for completion in completions]
    truncated = [completion.truncated for completion in completions]
    return reward.score(prompts, texts, truncated)
