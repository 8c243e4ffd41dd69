"""Policy losses with a trust region around the sampler, in probabilities and not in ratios.

log_ratio = logprobs - sampler_logprobs here, so rho = exp(log_ratio) corrects for an engine that
differs and for tokens that are old. p is the current probability of the sampled token, mu the
sampler's. A token outside the region has neither value nor gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.per_token.policy_losses import ratio_of
from megatron_rl.loss.per_token.response_losses import Clipped
from megatron_rl.loss.shapes import PerToken, TokenMask


@policy_loss(sampler_ratio=True)
def dppo(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta: PositiveFloat = 0.15,
) -> Clipped:
    """-rho A; 0 where D > delta and the step leads away: A > 0 and rho > 1, or A < 0 and rho < 1.

    D is between the Bernoulli distributions of mu and p: total variation or KL(mu, p).
    Source: DPPO (arXiv 2602.04879) eq. 12-14; its released runs have delta 0.15, and 0.05 for KL.
    """
    measure = {"tv": binary_variation, "kl": binary_kl}[divergence]
    is_far = measure(logprobs.detach(), log_ratio.detach()) > delta
    return _inside(log_ratio, advantages, is_far & (advantages * log_ratio > 0))


@policy_loss(sampler_ratio=True)
def ipo(
    logprobs: PerToken, log_ratio: PerToken, advantages: PerToken, *, eps: PositiveFloat = 0.3
) -> Clipped:
    """-rho A; 0 where |p - mu| > eps, whatever the sign of A.

    Source: INTELLECT policy optimization, section IPO loss of the algorithms of prime-rl.
    """
    is_far = binary_variation(logprobs.detach(), log_ratio.detach()) > eps
    return _inside(log_ratio, advantages, is_far)


def binary_variation(logprobs: PerToken, log_ratio: PerToken) -> PerToken:
    """|p - mu|, exact also where the two are close. Source: arXiv 2602.04879 eq. 13."""
    return (logprobs.exp() * torch.expm1(-log_ratio)).abs()


def binary_kl(logprobs: PerToken, log_ratio: PerToken) -> PerToken:
    """mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)), in nats. Source: arXiv 2602.04879 eq. 14.

    1 - p and 1 - mu are at least 2^-23, what a float32 can tell from 0: else a token that is
    certain, to rounding, would be infinitely far.
    """
    sampler_logprobs = logprobs - log_ratio
    rest, sampler_rest = _complement(logprobs), _complement(sampler_logprobs)
    of_others = sampler_rest * (sampler_rest / rest).log()
    return of_others - sampler_logprobs.exp() * log_ratio


def _complement(logprobs: Tensor) -> Tensor:
    return -torch.expm1(logprobs).clamp(max=-torch.finfo(torch.float32).eps)


def _inside(log_ratio: PerToken, advantages: PerToken, is_outside: TokenMask) -> Clipped:
    """-rho A, 0 outside, with no gradient there.

    The bounds are 1 outside and none inside: shares of clipped tokens are those of tokens outside.
    """
    ratio = ratio_of(log_ratio.masked_fill(is_outside, 0))
    lower = is_outside.to(ratio.dtype)
    upper = torch.full_like(ratio, torch.inf).masked_fill(is_outside, 1)
    return Clipped(-(ratio * advantages).masked_fill(is_outside, 0), lower, upper)
