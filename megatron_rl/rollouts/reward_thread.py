"""Rewards while others generate: no engine waits for a slow verifier."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_rl.protocols import Reward
from megatron_rl.rollouts.batch_thread import BatchThread
from megatron_rl.rollouts.environments.outcomes import Outcome, last_turn
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score


class Unscored(NamedTuple):
    """A response that waits for its score. ``outcome``: what its environment says of it, which may
    be the score."""

    request: Request
    prompt: Prompt
    completion: Completion
    outcome: Outcome | None = None


Scores = list[tuple[Unscored, Score]]


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

    def _score(self, responses: Sequence[Unscored]) -> Scores:
        known = {
            number: one.outcome.score
            for number, one in enumerate(responses)
            if one.outcome is not None and one.outcome.score is not None
        }
        judged = [one for number, one in enumerate(responses) if number not in known]
        texts = [self._decode(last_turn(one.completion)) for one in judged]
        truncated = [one.completion.truncated for one in judged]
        prompts = [one.prompt for one in judged]
        scores = iter(self._reward.score(prompts, texts, truncated) if judged else ())
        found: Scores = []
        for number, one in enumerate(responses):
            score = known[number] if number in known else next(scores)
            if one.outcome is not None:
                score = replace(score, environment=one.outcome.facts)
            found.append((one, score))
        return found
