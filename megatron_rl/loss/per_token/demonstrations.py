"""Policy losses of methods that also train on responses which the policy did not sample.

As in ``policy_losses.py``: what is minimized at each token, rho = exp(log_ratio). A demonstration
is a response that came with its prompt.
"""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.per_token.policy_losses import MAX_LOG_RATIO, DualClip, ratio_of
from megatron_rl.loss.per_token.response_losses import Clipped, clipped_around_one
from megatron_rl.loss.shapes import PerToken, ResponseFlags, TokenIndex, TokenMask


def forward_kl(log_u: PerToken, alpha: float) -> PerToken:
    """u - 1 - log u: over samples of the initial policy a mean of KL(initial, current)."""
    return torch.expm1(log_u) - log_u


def js(log_u: PerToken, alpha: float) -> PerToken:
    """u log u - (u + 1) log((u + 1) / 2), which makes the Jensen-Shannon divergence, doubled."""
    grown = torch.expm1(log_u)
    return (grown + 1) * log_u - (grown + 2) * torch.log1p(grown / 2)


def alpha_divergence(log_u: PerToken, alpha: float) -> PerToken:
    """(u^(1 - alpha) - (1 - alpha) u - alpha) / (alpha (alpha - 1))."""
    power = torch.expm1((1 - alpha) * log_u)
    return (power - (1 - alpha) * torch.expm1(log_u)) / (alpha * (alpha - 1))


DIVERGENCES = {"forward_kl": forward_kl, "js": js, "alpha": alpha_divergence}


@policy_loss()
def dph(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    ref_logprobs: PerToken,
    is_demonstration: ResponseFlags,
    response_index: TokenIndex,
    *,
    divergence: Literal["forward_kl", "js", "alpha"],
    eta: NonNegativeFloat = 0.01,
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
) -> Clipped:
    """eta f(u) at tokens of demonstrations, u = pi / pi_init, log u within +-20; -min(rho A,
    clip(rho, 1 - low, 1 + high) A) at the others.

    f by ``divergence``, with f(1) = f'(1) = 0 and f >= 0; one of them reads ``alpha``.
    Demonstrations are taken for samples of the initial policy, whose logprobs are the reference's.
    Source: DPH-RL (arXiv 2509.07430), its released code.
    """
    given = is_demonstration[response_index]
    log_u = torch.where(given, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    held = eta * DIVERGENCES[divergence](log_u.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), alpha)
    others = clipped_around_one(ratio_of(log_ratio), advantages, low, high)
    return _with_given(given, held, others)


@policy_loss()
def rl_plus(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    is_demonstration: ResponseFlags,
    response_index: TokenIndex,
    *,
    gamma: NonNegativeFloat = 0.5,
) -> PerToken:
    """-w A (1 - sg pi)^gamma at tokens of demonstrations, w = 2 pi / (pi_old + (pi_old + 1) / 2);
    -rho A at the others, without a clip.

    (pi_old + 1) / 2 stands for the probability under the unknown policy of a demonstration.
    Source: RL-PLUS (arXiv 2508.00222), its released code.
    """
    given = is_demonstration[response_index]
    probability = logprobs.exp()
    old = (logprobs - log_ratio).detach().exp()
    weight = 2 * probability / (old + (old + 1) / 2)
    unlikely = (1 - probability.detach()).clamp(min=0) ** gamma  # a logprob may round above 0
    learned = -weight * advantages * unlikely
    return torch.where(given, learned, -ratio_of(log_ratio) * advantages)


@policy_loss()
def exgrpo(
    log_ratio: PerToken,
    gap: PerToken,
    advantages: PerToken,
    is_demonstration: ResponseFlags,
    response_index: TokenIndex,
    *,
    beta: PositiveFloat = 0.1,
    low: NonNegativeFloat = 1.0,
    high: NonNegativeFloat | None = None,
    dual_c: DualClip = None,
) -> Clipped:
    """-A w / (w + beta) at tokens of demonstrations, w = pi / pi_past to the policy that sampled
    them, or pi where that is not known; -min(rho A, clip(rho, 1 - low, 1 + high) A) at the others,
    ``dual_clipped``, which by default is -rho A (``high`` null: no upper bound).

    Source: ExGRPO (arXiv 2510.02245), AMPO (arXiv 2510.02227), their released code.
    """
    # w / (w + beta) is the sigmoid of log w - log beta, which is finite for any w.
    shaped = -torch.sigmoid(log_ratio + gap - math.log(beta)) * advantages
    most = math.inf if high is None else high
    others = clipped_around_one(ratio_of(log_ratio), advantages, low, most, dual_c)
    return _with_given(is_demonstration[response_index], shaped, others)


def _with_given(given: TokenMask, values: PerToken, others: Clipped) -> Clipped:
    """``values`` at the tokens of demonstrations, where no bound holds, else ``others``."""
    return Clipped(
        torch.where(given, values, others.per_token),
        others.lower.masked_fill(given, -torch.inf),
        others.upper.masked_fill(given, torch.inf),
    )


@policy_loss()
def cross_entropy(
    logprobs: PerToken, is_demonstration: ResponseFlags, response_index: TokenIndex
) -> PerToken:
    """-log pi at tokens of demonstrations, 0 at the others: supervised fine-tuning."""
    return torch.where(is_demonstration[response_index], -logprobs, torch.zeros_like(logprobs))
