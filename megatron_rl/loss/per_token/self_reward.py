"""A reward that the policy gives itself, by one token after a response, taught by verdicts."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Bool, Float
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from megatron_rl.knobs import Piece
from megatron_rl.loss.batch import LossOutput
from megatron_rl.loss.per_token.terms import Terms
from megatron_rl.loss.shapes import Scalar


class SelfReward(Piece):
    """loss += alpha mean over responses (r_s - correct)^2.

    r_s = beta (logprob of the token ``token_id`` after the response - its mean at the run's start).
    Source: LaSeR (arXiv 2510.14943).
    """

    reads: ClassVar = ("end_logprobs", "end_index", "end_start")

    token_id: NonNegativeInt
    alpha: NonNegativeFloat = 0.1
    beta: PositiveFloat = 0.1

    def term(self, terms: Terms, weights: Tensor) -> LossOutput:
        """Its metric is the share where r_s > 1/2 says what the verdict says."""
        logprobs, index, start = (terms.column(name) for name in self.reads)
        correct = terms.correct[index]
        num = max(terms.num_responses, 1)
        loss = self.alpha * self.off(logprobs, start, correct).sum() / num
        right = self.agrees(logprobs, start, correct).to(terms.dtype).sum() / num
        return LossOutput(
            loss, {"loss/self_reward": loss.detach(), "policy/self_reward_accuracy": right}
        )

    def off(
        self, logprobs: Float[Tensor, " ends"], start: Scalar, correct: Bool[Tensor, " ends"]
    ) -> Float[Tensor, " ends"]:
        """(r_s - correct)^2."""
        reward = self.beta * (logprobs - start.to(logprobs.dtype))
        return (reward - correct.to(logprobs.dtype)).square()

    def agrees(
        self, logprobs: Float[Tensor, " ends"], start: Scalar, correct: Bool[Tensor, " ends"]
    ) -> Bool[Tensor, " ends"]:
        return (self.beta * (logprobs.detach() - start.to(logprobs.dtype)) > 0.5) == correct
