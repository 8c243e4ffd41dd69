"""A pull of the policy away from what it would say of an image that is mostly hidden."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def perception_kl(
    logprobs: Float[Tensor, " tokens"],
    masked_logprobs: Float[Tensor, " tokens"],
    *,
    max_log_ratio: float,
    max_kl: float,
) -> Float[Tensor, " tokens"]:
    """min(exp(d) - d - 1, max_kl), d = masked_logprobs - logprobs within +-max_log_ratio.

    k3 of KL(policy given the image, policy given the masked image). It is maximized, so both bounds
    matter: a token beyond one of them has no gradient.
    Source: PAPO (arXiv 2507.06448), its released code.
    """
    difference = (masked_logprobs - logprobs).clamp(-max_log_ratio, max_log_ratio)
    return (torch.expm1(difference) - difference).clamp(max=max_kl)


def perception_loss(
    logprobs: Float[Tensor, " tokens"],
    masked_logprobs: Float[Tensor, " tokens"],
    *,
    gamma: float,
    eta: float,
    eta_masked: float,
    max_log_ratio: float,
    max_kl: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """``(loss, kl)``: -gamma kl + eta H + eta_masked H_masked, and ``perception_kl``.

    H = -logprobs and H_masked = -masked_logprobs stand for the two entropies. The gradient goes
    through ``masked_logprobs`` too, where they have one.
    Source: PAPO (arXiv 2507.06448) eq. 2, its released code.
    """
    kl = perception_kl(logprobs, masked_logprobs, max_log_ratio=max_log_ratio, max_kl=max_kl)
    return -gamma * kl - eta * logprobs - eta_masked * masked_logprobs, kl
