"""Policy losses that look inside a response, or at what is around it.

As in ``policy_losses.py``: what is minimized at each token, rho = exp(log_ratio). Entropies are
those of the current policy, without gradient; a token is gated where its entropy is above a
quantile of its response.
"""

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.per_token.policy_losses import DualClip, dual_clipped, ratio_of
from megatron_rl.loss.per_token.terms import Terms
from megatron_rl.loss.segments import segments_of
from megatron_rl.loss.shapes import (
    PerResponse,
    PerToken,
    ResponseCounts,
    ResponseFlags,
    TokenIndex,
    TokenMask,
)
from megatron_rl.loss.whole_responses import WholeResponses

Share = Annotated[float, Field(ge=0, le=1)]


class Clipped(NamedTuple):
    """What a loss returns whose bounds differ from token to token: values, and its bounds of the
    ratio, so that the shares of clipped tokens are logged."""

    per_token: PerToken
    lower: PerToken
    upper: PerToken


def clipped(
    ratio: Tensor, advantages: Tensor, lower: Tensor, upper: Tensor, dual_c: float | None = None
) -> Clipped:
    """-min(ratio A, clip(ratio, lower, upper) A), ``dual_clipped``."""
    inside = torch.minimum(torch.maximum(ratio, lower), upper)
    loss = torch.maximum(-ratio * advantages, -inside * advantages)
    return Clipped(dual_clipped(loss, advantages, dual_c), lower, upper)


def clipped_around_one(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_c: float | None = None
) -> Clipped:
    """``clipped`` to 1 - low and 1 + high, the same bounds at every token."""
    lower, upper = (torch.full_like(ratio, bound) for bound in (1 - low, 1 + high))
    return clipped(ratio, advantages, lower, upper, dual_c)


@policy_loss()
def entropy_clip(
    log_ratio: PerToken,
    advantages: PerToken,
    entropy: PerToken,
    responses: WholeResponses,
    *,
    quantile: Share = 0.8,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
    reasoning_low: NonNegativeFloat = 0.5,
    reasoning_high: NonNegativeFloat = 0.5,
) -> Clipped:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), with bounds of their own at reasoning tokens.

    A token is one of reasoning where its entropy is above the quantile of its response.
    Source: Archer (arXiv 2507.15778), its released code.
    """
    reasons = entropy > responses.quantile(entropy, quantile)
    lower = torch.full_like(log_ratio, 1 - low).masked_fill(reasons, 1 - reasoning_low)
    upper = torch.full_like(log_ratio, 1 + high).masked_fill(reasons, 1 + reasoning_high)
    return clipped(ratio_of(log_ratio), advantages, lower, upper)


@policy_loss()
def simko(
    log_ratio: PerToken,
    advantages: PerToken,
    entropy: PerToken,
    correct: ResponseFlags,
    response_index: TokenIndex,
    topk_logprobs: Float[Tensor, "tokens top_k"],
    is_argmax: TokenMask,
    responses: WholeResponses,
    *,
    quantile: Share = 0.8,
    top_k: PositiveInt = 3,
    spread: Share = 0.01,
    penalty: PositiveFloat = 1.1,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = rho but at tokens whose entropy is above the
    quantile of their response.

    There, of correct responses, r = (1 - spread) rho + spread/K sum_k sg(rho / rho_k) rho_k over
    the K = ``top_k`` most likely tokens: the value of rho, with a share of its gradient spread over
    them. sg(rho / rho_k) rho_k is sg(rho) pi_k / sg(pi_k): their old probabilities cancel. A < 0 at
    the most likely token is multiplied by ``penalty`` there.
    Source: SimKO (arXiv 2510.14807), its released code.
    """
    gate = entropy > responses.quantile(entropy, quantile)
    ratio = ratio_of(log_ratio)
    grown = (topk_logprobs - topk_logprobs.detach()).exp().mean(1)  # 1, with a gradient
    spread_out = (1 - spread) * ratio + spread * ratio.detach() * grown
    ratio = torch.where(correct[response_index] & gate, spread_out, ratio)
    held = gate & is_argmax & (advantages < 0)
    advantages = torch.where(held, penalty * advantages, advantages)
    return clipped_around_one(ratio, advantages, low, high)


@policy_loss()
def adaptive_clip(
    logprobs: PerToken,
    log_ratio: PerToken,
    advantages: PerToken,
    *,
    low: NonNegativeFloat = 0.16,
    high: NonNegativeFloat = 0.2,
    largest: Annotated[float, Field(ge=1)] = 10.0,
    dual_c: DualClip = 10.0,
) -> Clipped:
    """-min(rho A, clip(rho, a, b) A), ``dual_clipped``, with bounds by the old probability q of the
    token: a = 1/2 + sqrt(max(1 - 4 low / q, 0)) / 2, b = min(1/2 + sqrt(1 + 4 high / q) / 2,
    largest).

    They are where |rho - 1| rho q reaches low or high: rare tokens may move further.
    Source: DCPO (arXiv 2509.02333), dynamic adaptive clipping; its released code.
    """
    old_probability = (logprobs - log_ratio).detach().exp()
    lower = 0.5 + 0.5 * (1 - 4 * low / old_probability).clamp(min=0).sqrt()
    upper = (0.5 + 0.5 * (1 + 4 * high / old_probability).sqrt()).clamp(max=largest)
    return clipped(ratio_of(log_ratio), advantages, lower, upper, dual_c)


@policy_loss()
def gmpo(
    log_ratio: PerToken,
    advantages: PerToken,
    terms: Terms,
    *,
    low: NonNegativeFloat = 0.4,
    high: NonNegativeFloat = 0.4,
) -> Clipped:
    """-s A, s the geometric mean over the response of rho, which stops at e^high where A > 0 and at
    e^-low where A < 0.

    log s is the mean over the response's loss tokens; a token that is stopped keeps its share of
    that mean, and has no gradient. A response without loss tokens has s = 1.
    Source: GMPO (arXiv 2507.20673), its objective with the clip at each token; its section 4 has
    the range e^-0.4 to e^0.4.
    """
    stopped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio)
    stopped = torch.where(advantages < 0, log_ratio.clamp(min=-low), stopped)
    mean = terms.response_mean(stopped)
    lower, upper = (torch.full_like(mean, bound).exp() for bound in (-low, high))
    return Clipped(-ratio_of(mean) * advantages, lower, upper)


@policy_loss()
def pacs(
    logprobs: PerToken,
    log_ratio_sums: PerResponse,
    correct: ResponseFlags,
    group_ids: ResponseCounts,
    response_loss_tokens: ResponseCounts,
    response_index: TokenIndex,
    *,
    beta: PositiveFloat = 1.0,
) -> PerToken:
    """w_i BCE(psi_i, correct_i) of response i, psi_i = rhat_i - mean of the others' rhat in its
    group, rhat_i = beta sum_t log rho_t; spread evenly over its tokens, so that their sum is it.

    w_i = G / (2 responses of i's class) where both classes are in the group of G, else 1. Groups
    are what the minibatch has of them. Once psi is known the gradient is linear in the tokens'
    logprobs: psi comes from ``log_ratio_sums``, and no token waits for another. Advantages are not
    read.
    Source: PACS (arXiv 2509.02522), its released code.
    """
    # Responses of other minibatches have no loss tokens here.
    present = response_loss_tokens > 0
    groups = segments_of(group_ids)
    size = groups.broadcast(groups.sum(present))
    others = (size - 1).clamp(min=1)
    estimate = beta * log_ratio_sums * present
    psi = estimate - (groups.broadcast(groups.sum(estimate)) - estimate) / others
    num_correct = groups.broadcast(groups.sum(correct & present))
    of_class = torch.where(correct, num_correct, size - num_correct)
    both = (num_correct > 0) & (num_correct < size)
    balanced = size.to(psi.dtype) / (2 * of_class).clamp(min=1)
    weight = torch.where(both, balanced, torch.ones_like(psi))
    loss = weight * (torch.nn.functional.softplus(psi) - correct * psi)
    slope = weight * (psi.sigmoid() - correct.to(psi.dtype)) * present
    # psi_i grows with rhat_i, and falls by 1/others with that of each other response.
    pull = slope - (groups.broadcast(groups.sum(slope)) - slope) / others
    value = loss / response_loss_tokens.clamp(min=1)
    rise = logprobs - logprobs.detach()  # 0, with a gradient
    return value[response_index] + beta * pull[response_index] * rise
