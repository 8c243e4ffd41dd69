"""Per-token policy losses: what is minimized, before it is aggregated.

log_ratio = logprobs - old_logprobs, rho = exp(log_ratio) as ``ratio_of`` has it, advantages stand
at each token. On policy (rho = 1) each has the gradient of ``reinforce``. A policy loss is one
function here: inputs before the star, knobs after it (see ``choices.py``).
"""

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.shapes import PerToken

MAX_LOG_RATIO = 20.0
DualClip = Annotated[float, Field(gt=1)] | None


def ratio_of(log_ratio: PerToken) -> PerToken:
    """exp(log_ratio) for log ratios in +-20, e^20 or e^-20 without a gradient beyond.

    A ratio that is infinite would leave a clipped loss finite, but its gradient 0 times infinity.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def dual_clipped(loss: PerToken, advantages: PerToken, dual_c: float | None) -> PerToken:
    """min(loss, -dual_c A) where A < 0; unchanged without dual_c. Source: arXiv 1912.09729."""
    if dual_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_c * advantages), loss)


@policy_loss(clips=True)
def ppo_clip(
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
    dual_c: DualClip = None,
) -> PerToken:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), ``dual_clipped``.

    Source: PPO (arXiv 1707.06347) eq. 7; clip-higher: DAPO (arXiv 2503.14476) eq. 8.
    """
    ratio = ratio_of(log_ratio)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    return dual_clipped(loss, advantages, dual_c)


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

    Where rho stops (``ratio_of``) p is 1, or as at rho = 0.
    Source: SAPO (arXiv 2511.20347) eq. 5-6.
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = (tau * (ratio_of(log_ratio) - 1)).sigmoid()
    return -4 / tau * gate * advantages


@policy_loss()
def reinforce(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """-A logp. Source: Williams 1992; GPG (arXiv 2504.02546)."""
    return -advantages * logprobs


@policy_loss()
def ratio(log_ratio: PerToken, advantages: PerToken) -> PerToken:
    """-rho A, the importance-weighted objective without a clip."""
    return -ratio_of(log_ratio) * advantages
