"""Per-token policy losses: what is minimized, before it is aggregated.

log_ratio = logprobs - old_logprobs, rho = exp(log_ratio), advantages stand at each token. On
policy (rho = 1) each has the gradient of ``reinforce``. A policy loss is one function here: inputs
before the star, knobs after it (see ``choices.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.shapes import PerToken, ResponseCounts, TokenIndex, TokenMask


@policy_loss(clips=True)
def ppo_clip(
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
    dual_c: Annotated[float, Field(gt=1)] | None = None,
) -> PerToken:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with dual_c floored at dual_c A where A < 0.

    Source: PPO (arXiv 1707.06347) eq. 7; clip-higher: DAPO (arXiv 2503.14476) eq. 8; dual clip:
    arXiv 1912.09729.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_c * advantages), loss)


@policy_loss(sequence_ratio=True, clips=True)
def gspo(
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    low: NonNegativeFloat = 3e-4,
    high: NonNegativeFloat = 4e-4,
) -> PerToken:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean log_ratio of the response).

    Source: GSPO (arXiv 2507.18071) eq. 5-7. With one token per response it is ``ppo_clip`` itself.
    """
    return ppo_clip(log_ratio, advantages, low=low, high=high)


@policy_loss(clips=True)
def cispo(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    low: NonNegativeFloat = 1.0,
    high: NonNegativeFloat = 2.0,
) -> PerToken:
    """-sg(clip(rho, 1 - low, 1 + high)) A logp: no token loses its gradient to the clip.

    low 1 means no lower bound. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5.
    """
    weight = log_ratio.detach().exp().clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs


@policy_loss()
def sapo(
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    tau_pos: PositiveFloat = 1.0,
    tau_neg: PositiveFloat = 1.05,
) -> PerToken:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos where A > 0, else tau_neg: no clip, but a
    gradient -4 p (1 - p) rho A, p the sigmoid, that fades as rho leaves 1.

    rho stops at e^20, where p is 1: beyond it p' rho would be 0 times infinity.
    Source: SAPO (arXiv 2511.20347) eq. 5-6.
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = (tau * (log_ratio.clamp(max=20).exp() - 1)).sigmoid()
    return -4 / tau * gate * advantages


@policy_loss()
def reinforce(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """-A logp. Source: Williams 1992; GPG (arXiv 2504.02546)."""
    return -advantages * logprobs


@policy_loss()
def ratio(log_ratio: PerToken, advantages: PerToken) -> PerToken:
    """-rho A, the importance-weighted objective without a clip."""
    return -log_ratio.exp() * advantages


def sequence_log_ratio(
    log_ratio: PerToken,
    loss_mask: TokenMask,
    response_index: TokenIndex,
    response_loss_tokens: ResponseCounts,
    sequence_sum: Callable[[Tensor], Tensor],
) -> PerToken:
    """log s_i = mean of log rho over the response's loss tokens, at each of them, with gradient.

    ``sequence_sum`` adds the ranks that share a response (context parallelism).
    """
    kept = torch.where(loss_mask, log_ratio, torch.zeros_like(log_ratio))
    none_yet = torch.zeros(response_loss_tokens.shape, dtype=kept.dtype, device=kept.device)
    sums = none_yet.index_add(0, response_index, kept)
    return (sequence_sum(sums) / response_loss_tokens.clamp(min=1))[response_index]
