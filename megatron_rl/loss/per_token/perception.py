"""A pull of the policy away from what it would say of an image that is mostly hidden."""

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from megatron_rl.loss.batch import LossOutput
from megatron_rl.loss.per_token.aggregate import weighted_sum
from megatron_rl.loss.per_token.terms import LossTerm, Terms
from megatron_rl.loss.shapes import PerToken


class Perception(LossTerm):
    """loss += -gamma KL(policy, policy given the masked image) + eta H + eta_masked H_masked.

    H = -logprobs and H_masked = -masked_logprobs stand for the two entropies. Each patch of an
    image is black with probability ``mask_ratio``. ``masked``: the policy that is given the masked
    image is the current one, with gradient, or the one before the updates of the step, without.
    Source: PAPO (arXiv 2507.06448) eq. 2, its released code.
    """

    reads = ("masked_logprobs",)

    gamma: NonNegativeFloat = 0.02
    eta: NonNegativeFloat = 0.05
    eta_masked: NonNegativeFloat = 0.05
    mask_ratio: Annotated[float, Field(ge=0, le=1)] = 0.6
    masked: Literal["current", "old"] = "current"
    max_log_ratio: PositiveFloat = 20.0
    max_kl: PositiveFloat = 10.0

    def term(self, terms: Terms, weights: Tensor) -> LossOutput:
        """Its metrics are the mean of the KL, and the mean -logprob that masked images leave."""
        masked = terms.column("masked_logprobs")
        kl = self.kl(terms.logprobs, masked)
        loss = weighted_sum(self.loss(terms.logprobs, masked, kl), weights, terms.loss_mask)
        metrics = {
            "kl/perception_mean": terms.mean(kl),
            "entropy/masked_sampled_mean": terms.mean(-masked),
        }
        return LossOutput(loss, {"loss/perception": loss.detach(), **metrics})

    def loss(self, logprobs: PerToken, masked_logprobs: PerToken, kl: PerToken) -> PerToken:
        return -self.gamma * kl - self.eta * logprobs - self.eta_masked * masked_logprobs

    def kl(self, logprobs: PerToken, masked_logprobs: PerToken) -> PerToken:
        """min(exp(d) - d - 1, max_kl), d = masked_logprobs - logprobs within +-max_log_ratio.

        k3 of KL(policy given the image, policy given the masked image). It is maximized, so both
        bounds matter: a token beyond one of them has no gradient. The gradient goes through
        ``masked_logprobs`` too, where they have one.
        """
        difference = (masked_logprobs - logprobs).clamp(-self.max_log_ratio, self.max_log_ratio)
        return (torch.expm1(difference) - difference).clamp(max=self.max_kl)
