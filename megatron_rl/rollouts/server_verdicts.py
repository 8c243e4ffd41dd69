"""Verdicts on the answers of servers, in a thread of their own.

Runs in the dispatcher's thread; the reward is called in another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_rl.types import Completion, Prompt, Score


@dataclass(frozen=True)
class _Group:
    prompt: Prompt
    completions: Sequence[Completion]
    scores: asyncio.Future[list[Score]]


class Verdicts:
    """One call of ``judge`` at a time; the next gets all groups that are whole by then, as the
    ``Judge`` of the training processes does. So a reward that takes many responses at once has
    them. Two prompts or more may be in one call: ``judge`` gets the prompt of each completion."""

    def __init__(
        self,
        judge: Callable[[Sequence[Prompt], Sequence[Completion]], Sequence[Score]],
        at_most: int,
    ) -> None:
        """``at_most``: responses in a call of several groups; those of a step, since
        ``reward.step_timeout_s`` bounds one call."""
        self._judge = judge
        self._at_most = at_most
        self._thread = ThreadPoolExecutor(1, "verdicts")
        self._waiting: list[_Group] = []
        self._work: asyncio.Task[None] | None = None

    async def on(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """Of all responses to a prompt. Raises what the judge raises on any of its call."""
        group = _Group(prompt, completions, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._call_until_none_waits())
        return await group.scores

    def forget(self) -> None:
        """Nobody asks for what is not judged yet."""
        if self._work is not None:
            self._work.cancel()

    def close(self) -> None:
        """Waits for the call that is at work."""
        self._thread.shutdown()

    async def _call_until_none_waits(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            groups = self._next_call()
            prompts = [group.prompt for group in groups for _ in group.completions]
            completions = [one for group in groups for one in group.completions]
            call = loop.run_in_executor(self._thread, self._judge, prompts, completions)
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            end = 0
            for group in groups:
                begin = end
                end += len(group.completions)
                if group.scores.done():
                    continue  # nobody waits for it any more
                if isinstance(outcome, BaseException):
                    group.scores.set_exception(outcome)
                else:
                    group.scores.set_result(list(outcome[begin:end]))

    def _next_call(self) -> list[_Group]:
        """In the order they came; one group at least."""
        count = 0
        num_responses = 0
        for group in self._waiting:
            num_responses += len(group.completions)
            if count > 0 and num_responses > self._at_most:
                break
            count += 1
        groups = self._waiting[:count]
        del self._waiting[:count]
        return groups
