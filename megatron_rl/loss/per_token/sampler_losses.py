"""Policy losses that read the sampler: a trust region around it, in probabilities and not in
ratios, a score that is centered over it, and a teacher at the tokens that it finds likely.

log_ratio = logprobs - sampler_logprobs here, so rho = exp(log_ratio) corrects for an engine that
differs and for tokens that are old. p is the current probability of the sampled token, mu the
sampler's. A token outside the region has neither value nor gradient. Without centering, an
advantage that is not 0 on average at a prefix pulls the policy towards the sampler at every step.
"""

from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.per_token.mismatch import icepop, truncated_importance
from megatron_rl.loss.per_token.policy_losses import ratio_of
from megatron_rl.loss.per_token.response_losses import Clipped
from megatron_rl.loss.shapes import PerToken, TokenMask

PerHead = Float[Tensor, "tokens head"]


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


@policy_loss(sampler_ratio=True)
def score_centered(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    likely_logprobs: PerHead,
    sampler_likely_logprobs: PerHead,
    *,
    weight: Literal["none", "tis", "icepop"] = "tis",
    cap: Annotated[float, Field(gt=1)] = 2.0,
    top_k: Annotated[int, Field(ge=1, le=256)] = 32,
) -> PerToken:
    """-A (w log p_a - sum over the head of c_v log p_v), p of the policy and q of the sampler.

    The head is the ``top_k`` tokens that were most likely to q, c_v = q_v f(p_v / q_v)
    - alpha f(1 / alpha) p_v with alpha = (1 - Q) / (1 - P), Q and P the masses of the head, and
    w = f(p_a / q_a), f = ``weight``: 1, or one of ``mismatch`` with ``cap``. Outside the head q is
    taken to be alpha p: there the mean of f s, s = d log p, is alpha f(1 / alpha) times that of p,
    and sum_v p_v s_v = 0 turns it into a sum over the head. A head that is the whole vocabulary
    centers exactly.
    Source: arXiv 2609.20807.
    """
    weights = {
        "none": torch.ones_like,
        "tis": partial(truncated_importance, cap=cap),
        "icepop": partial(icepop, cap=cap),
    }
    f = weights[weight]  # of the logarithm of its argument
    is_free = torch.isinf(sampler_likely_logprobs)
    head = likely_logprobs.masked_fill(is_free, 0)
    log_p, log_q = head.detach(), sampler_likely_logprobs.masked_fill(is_free, 0)
    p = log_p.exp().masked_fill(is_free, 0)
    q = log_q.exp().masked_fill(is_free, 0)
    # log(1 / alpha). Of a head that is all there is, the rests are rounding: their ratio is 1.
    log_tail = _rest(p).log() - _rest(q).log()
    tail = torch.exp(-log_tail) * f(log_tail)
    of_head = f((log_p - log_q).flatten()).reshape(q.shape)
    centers = q * of_head - tail[:, None] * p
    own = f(log_ratio.detach()) * logprobs
    return -advantages.detach() * (own - (centers.detach() * head).sum(1))


@policy_loss()
def teacher_top_k(
    log_ratio: PerToken,
    advantages: PerToken,
    likely_logprobs: PerHead,
    teacher_likely_logprobs: PerHead,
    *,
    coef: NonNegativeFloat = 1.0,
    top_k: Annotated[int, Field(ge=1, le=256)] = 32,
) -> PerToken:
    """-rho A + coef (sum over the head of p_v log(p_v / q_v) + (1 - P) log((1 - P) / (1 - Q))).

    The head is the ``top_k`` tokens that were most likely to the sampler, P and Q its masses under
    the policy and its teacher. All other tokens count as one, so this is KL(p, q) at most, and
    equal to it where the head is the whole vocabulary.
    Source: GKD (arXiv 2306.13649), reverse KL, with a head in place of the vocabulary.
    """
    is_free = torch.isinf(teacher_likely_logprobs)
    log_p = likely_logprobs.masked_fill(is_free, 0)
    log_q = teacher_likely_logprobs.masked_fill(is_free, 0)
    p = log_p.exp().masked_fill(is_free, 0)
    rest = _rest(p)
    other = _rest(log_q.exp().masked_fill(is_free, 0))
    divergence = (p * (log_p - log_q)).sum(1) + rest * (rest / other).log()
    return -ratio_of(log_ratio) * advantages + coef * divergence


def _rest(masses: PerHead) -> PerToken:
    """At least 2^-23, what a sum in float32 can tell from 1."""
    return (1 - masses.sum(1)).clamp(min=torch.finfo(torch.float32).eps)
