"""Per-token policy losses. log_ratio = logprobs - old_logprobs; rho = exp(log_ratio); advantages are already per token.

Every function returns what is minimised. On policy (rho = 1) each has the gradient of ``reinforce``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def ppo_clip(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], *, low: float, high: float, dual_c: float | None = None
) -> Float[Tensor, " tokens"]:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with dual_c the objective is floored at dual_c A for A < 0.

    Source: PPO (arXiv 1707.06347) eq. 7; clip-higher: DAPO (arXiv 2503.14476) eq. 8; dual clip: arXiv 1912.09729.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_c * advantages), loss)


def sequence_log_ratio(
    log_ratio: Float[Tensor, " tokens"],
    loss_mask: Bool[Tensor, " tokens"],
    response_ids: Int[Tensor, " tokens"],
    response_loss_tokens: Int[Tensor, " responses"],
    sequence_sum: Callable[[Tensor], Tensor],
) -> Float[Tensor, " tokens"]:
    """log s_i = mean over the loss tokens of the response of log rho, with gradient, broadcast to its tokens.

    ``sequence_sum`` adds the ranks that share a response. exp(result) in ``ppo_clip`` is GSPO (arXiv 2507.18071 eq. 5-7),
    with one token per response it is ppo_clip itself.
    """
    kept = torch.where(loss_mask, log_ratio, torch.zeros_like(log_ratio))
    sums = torch.zeros(response_loss_tokens.shape, dtype=kept.dtype, device=kept.device).index_add(0, response_ids, kept)
    return (sequence_sum(sums) / response_loss_tokens.clamp(min=1))[response_ids]


def cispo(
    logprobs: Float[Tensor, " tokens"],
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    low: float,
    high: float,
) -> Float[Tensor, " tokens"]:
    """-sg(clip(rho, 1 - low, 1 + high)) A logp: the weight is clipped and detached, so no token loses its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5; low 1 means no lower bound.
    """
    weight = log_ratio.detach().exp().clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs


def reinforce(logprobs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-A logp. Source: Williams 1992; GPG (arXiv 2504.02546)."""
    return -advantages * logprobs


def ratio(log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-rho A, the importance-weighted objective without a clip."""
    return -log_ratio.exp() * advantages
