"""Per-token policy losses: what is minimized, before it is aggregated.

log_ratio = logprobs - old_logprobs, rho = exp(log_ratio), advantages stand at each token. On
policy (rho = 1) each has the gradient of ``reinforce``. A policy loss is one function here: inputs
before the star, knobs after it (see ``choices.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.segments import segments_of
from megatron_rl.loss.whole_responses import WholeResponses

Share = Annotated[float, Field(ge=0, le=1)]


class Clipped(NamedTuple):
    """What a loss returns whose bounds differ from token to token: values, and its bounds of the
    ratio, so that the shares of clipped tokens are logged."""

    per_token: Float[Tensor, " tokens"]
    lower: Float[Tensor, " tokens"]
    upper: Float[Tensor, " tokens"]


@policy_loss(clips=True)
def ppo_clip(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
    dual_c: Annotated[float, Field(gt=1)] | None = None,
) -> Float[Tensor, " tokens"]:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with dual_c floored at dual_c A where A < 0.

    Source: PPO (arXiv 1707.06347) eq. 7; clip-higher: DAPO (arXiv 2503.14476) eq. 8; dual clip:
    arXiv 1912.09729.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_c * advantages), loss)


@policy_loss()
def entropy_clip(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"],
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
    ratio = log_ratio.exp()
    reasons = entropy > responses.quantile(entropy, quantile)
    lower = torch.full_like(ratio, 1 - low).masked_fill(reasons, 1 - reasoning_low)
    upper = torch.full_like(ratio, 1 + high).masked_fill(reasons, 1 + reasoning_high)
    clipped = torch.minimum(torch.maximum(ratio, lower), upper)
    return Clipped(torch.maximum(-ratio * advantages, -clipped * advantages), lower, upper)


@policy_loss(clips=True)
def simko(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    entropy: Float[Tensor, " tokens"],
    correct: Bool[Tensor, " responses"],
    response_index: Int[Tensor, " tokens"],
    topk_logprobs: Float[Tensor, "tokens top_k"],
    is_argmax: Bool[Tensor, " tokens"],
    responses: WholeResponses,
    *,
    quantile: Share = 0.8,
    top_k: PositiveInt = 3,
    spread: Share = 0.01,
    penalty: PositiveFloat = 1.1,
    low: NonNegativeFloat = 0.2,
    high: NonNegativeFloat = 0.2,
) -> Float[Tensor, " tokens"]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = rho but at tokens whose entropy is above the
    quantile of their response.

    There, of correct responses, r = (1 - spread) rho + spread/K sum_k sg(rho / rho_k) rho_k over
    the K = ``top_k`` most likely tokens: the value of rho, with a share of its gradient spread over
    them. sg(rho / rho_k) rho_k is sg(rho) pi_k / sg(pi_k): their old probabilities cancel. A < 0 at
    the most likely token is multiplied by ``penalty`` there.
    Source: SimKO (arXiv 2510.14807), its released code.
    """
    gate = entropy > responses.quantile(entropy, quantile)
    ratio = log_ratio.exp()
    grown = (topk_logprobs - topk_logprobs.detach()).exp().mean(1)  # 1, with a gradient
    spread_out = (1 - spread) * ratio + spread * ratio.detach() * grown
    ratio = torch.where(correct[response_index] & gate, spread_out, ratio)
    held = gate & is_argmax & (advantages < 0)
    advantages = torch.where(held, penalty * advantages, advantages)
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)


@policy_loss(sequence_ratio=True, clips=True)
def gspo(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    low: NonNegativeFloat = 3e-4,
    high: NonNegativeFloat = 4e-4,
) -> Float[Tensor, " tokens"]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean log_ratio of the response).

    Source: GSPO (arXiv 2507.18071) eq. 5-7. With one token per response it is ``ppo_clip`` itself.
    """
    return ppo_clip(log_ratio, advantages, low=low, high=high)


@policy_loss(clips=True)
def cispo(
    logprobs: Float[Tensor, " tokens"],
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    low: NonNegativeFloat = 1.0,
    high: NonNegativeFloat = 2.0,
) -> Float[Tensor, " tokens"]:
    """-sg(clip(rho, 1 - low, 1 + high)) A logp: no token loses its gradient to the clip.

    low 1 means no lower bound. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5.
    """
    weight = log_ratio.detach().exp().clamp(1 - low, 1 + high)
    return -weight * advantages * logprobs


@policy_loss()
def reinforce(
    logprobs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """-A logp. Source: Williams 1992; GPG (arXiv 2504.02546)."""
    return -advantages * logprobs


@policy_loss()
def pacs(
    logprobs: Float[Tensor, " tokens"],
    log_ratio_sums: Float[Tensor, " responses"],
    correct: Bool[Tensor, " responses"],
    group_ids: Int[Tensor, " responses"],
    response_loss_tokens: Int[Tensor, " responses"],
    response_index: Int[Tensor, " tokens"],
    *,
    beta: PositiveFloat = 1.0,
) -> Float[Tensor, " tokens"]:
    """w_i BCE(psi_i, correct_i) of response i, psi_i = rhat_i - mean of the others' rhat in its
    group, rhat_i = beta sum_t log rho_t; spread evenly over its tokens, so that their sum is it.

    w_i = G / (2 responses of i's class) where both classes are in the group of G, else 1. Groups
    are what the minibatch has of them. Once psi is known the gradient is linear in the tokens'
    logprobs: psi comes from ``log_ratio_sums``, and no token waits for another. Advantages are not
    read.
    Source: PACS (arXiv 2509.02522), its released code.
    """
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


@policy_loss()
def ratio(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """-rho A, the importance-weighted objective without a clip."""
    return -log_ratio.exp() * advantages


def sequence_log_ratio(
    log_ratio: Float[Tensor, " tokens"],
    loss_mask: Bool[Tensor, " tokens"],
    response_index: Int[Tensor, " tokens"],
    response_loss_tokens: Int[Tensor, " responses"],
    sequence_sum: Callable[[Tensor], Tensor],
) -> Float[Tensor, " tokens"]:
    """log s_i = mean of log rho over the response's loss tokens, at each of them, with gradient.

    ``sequence_sum`` adds the ranks that share a response (context parallelism).
    """
    kept = torch.where(loss_mask, log_ratio, torch.zeros_like(log_ratio))
    none_yet = torch.zeros(response_loss_tokens.shape, dtype=kept.dtype, device=kept.device)
    sums = none_yet.index_add(0, response_index, kept)
    return (sequence_sum(sums) / response_loss_tokens.clamp(min=1))[response_index]
