"""A reward that the policy gives itself, by one token after a response, taught by verdicts."""

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from megatron_rl.loss.batch import LossOutput
from megatron_rl.loss.per_token.terms import LossTerm, Terms
from megatron_rl.loss.shapes import PerResponse, ResponseFlags, Scalar


class SelfReward(LossTerm):
    """loss += alpha mean over responses w_i (r_s - correct)^2.

    r_s = beta (logprob of the token ``token_id`` after the response - its mean at the run's start);
    w_i = F / (2 F of i's class), F the step's responses that were not cut by the limit, so that
    both classes count alike; 0 of a response that was cut.
    Source: LaSeR (arXiv 2510.14943), its released run.
    """

    reads = ("end_logprobs", "end_index", "end_start", "was_cut")

    token_id: NonNegativeInt
    alpha: NonNegativeFloat = 0.1
    beta: PositiveFloat = 0.1

    def term(self, terms: Terms, weights: Tensor) -> LossOutput:
        """Its metric: the share of uncut responses where r_s > 1/2 says what the verdict says."""
        logprobs, index, start, was_cut = (terms.column(name) for name in self.reads)
        correct = terms.correct[index]
        off = self.class_weights(terms.correct, was_cut, terms.dtype)[index]
        reward = self.reward(logprobs, start)
        off = off * (reward - correct.to(reward.dtype)).square()
        loss = self.alpha * off.sum() / max(terms.num_responses, 1)
        # Responses of other minibatches have no loss tokens here.
        finished = ~was_cut & (terms.response_loss_tokens > 0)
        agrees = ((reward.detach() > 0.5) == correct) & finished[index]
        right = agrees.to(terms.dtype).sum() / finished.sum().clamp(min=1)
        return LossOutput(
            loss, {"loss/self_reward": loss.detach(), "policy/self_reward_accuracy": right}
        )

    def class_weights(
        self, correct: ResponseFlags, was_cut: ResponseFlags, dtype: torch.dtype
    ) -> PerResponse:
        """The weight w_i of each response of the step."""
        finished = ~was_cut
        num_correct = (correct & finished).sum()
        of_class = torch.where(correct, num_correct, finished.sum() - num_correct)
        return (finished.sum().to(dtype) / (2 * of_class).clamp(min=1)).masked_fill(was_cut, 0)

    def reward(self, logprobs: Float[Tensor, " ends"], start: Scalar) -> Float[Tensor, " ends"]:
        """r_s."""
        return self.beta * (logprobs - start.to(logprobs.dtype))
