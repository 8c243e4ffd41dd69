"""Advantage shaping: factors applied to estimated advantages, and what is added to them.

Every factor is >= 0, so it never changes a sign. p (``share``) is the accuracy of the group at each
response; omega the mean reward of the batch clipped to [0, 1]. A shaper is one function here:
inputs before the star, knobs after it (see ``choices.py``).
"""

from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from megatron_rl.loss.choices import shaper
from megatron_rl.loss.segments import Segments, segments_of
from megatron_rl.loss.shapes import (
    PerResponse,
    PerToken,
    ResponseCounts,
    ResponseFlags,
    Scalar,
    TokenIndex,
)
from megatron_rl.loss.whole_responses import WholeResponses

Form = Literal["paper", "released"]
ROUNDING = 1e-9  # share * tokens that is whole but for its last bit is not rounded up


@shaper
def stcr(
    advantages: PerResponse,
    correct: ResponseFlags,
    lengths: ResponseCounts,
    groups: Segments,
    *,
    mu: Annotated[float, Field(ge=1)] = 1.0001,
    window: Literal["batch", "group"] = "batch",
    only_negative: bool = False,
) -> PerResponse:
    """A_i (2 - mu^(Lbar - L_i)) if incorrect and L_i > Lbar, else A_i; the factor is in [1, 2).

    Lbar is the mean length of the correct responses of the window, whole batch or group; without
    any correct response nothing changes. It multiplies whatever the sign; ``only_negative`` leaves
    positive advantages alone.
    Source: APO (arXiv 2506.21655) eq. 6-7.
    """
    if window == "batch":
        groups = segments_of(torch.zeros_like(groups.index))
    tokens = lengths.to(advantages.dtype)
    num_correct = groups.sum(correct)
    mean = groups.broadcast(groups.sum(tokens * correct) / num_correct.clamp(min=1))
    longer = ~correct & groups.broadcast(num_correct > 0) & (tokens > mean)
    if only_negative:
        longer = longer & (advantages < 0)
    exponent = torch.where(longer, mean - tokens, torch.zeros_like(tokens))
    return advantages * (2 - mu**exponent)


@shaper
def ddas(
    advantages: PerResponse, share: PerResponse, omega: Scalar, *, easy_form: Form = "paper"
) -> PerResponse:
    """omega/2 A / sqrt(p) + (1 - omega)/2 A / sqrt(1 - p); unchanged where p is 0 or 1.

    ``easy_form``: that of ``easy_focused``.
    Source: A-GRAE (arXiv 2602.05548) eq. 12.
    """
    hard = hard_focused(advantages, share)
    easy = easy_focused(advantages, share, easy_form=easy_form)
    return torch.where(_inside(share), omega * hard + (1 - omega) * easy, advantages)


@shaper
def ass(advantages: PerResponse, omega: Scalar, *, alpha: PositiveFloat = 1.0) -> PerResponse:
    """A min(1, omega / alpha) if A > 0 else A.

    Source: A-GRAE (arXiv 2602.05548) eq. 13 (alpha 1; 0.5 for multimodal models).
    """
    return torch.where(advantages > 0, advantages * (omega / alpha).clamp(max=1), advantages)


@shaper
def sign_scale(
    advantages: PerResponse, *, positive: NonNegativeFloat = 1.0, negative: NonNegativeFloat = 1.0
) -> PerResponse:
    """positive A if A > 0, negative A if A < 0.

    Source: A-GRAE (arXiv 2602.05548) section 4.1 (positive 10 or 0.1).
    """
    return torch.where(advantages > 0, positive * advantages, negative * advantages)


@shaper
def hard_focused(advantages: PerResponse, share: PerResponse) -> PerResponse:
    """0.5 A / sqrt(p); unchanged where p is 0 or 1.

    Source: A-GRAE (arXiv 2602.05548) section 4.1.
    """
    return torch.where(_inside(share), 0.5 * advantages * _safe(share).rsqrt(), advantages)


@shaper
def easy_focused(
    advantages: PerResponse, share: PerResponse, *, easy_form: Form = "paper"
) -> PerResponse:
    """0.5 A / sqrt(1 - p); unchanged where p is 0 or 1.

    ``easy_form`` released divides by 1 - sqrt(p) + 1e-6 instead: at p = 0.75 by 0.134, not 0.5.
    Source: A-GRAE (arXiv 2602.05548) section 4.1; its released code.
    """
    shaped = 0.5 * advantages * _safe(1 - share).rsqrt()
    if easy_form == "released":
        shaped = 0.5 * advantages / (1 - share.sqrt() + 1e-6)
    return torch.where(_inside(share), shaped, advantages)


@shaper
def focal(
    advantages: PerResponse, share: PerResponse, *, gamma: NonNegativeFloat = 0.5
) -> PerResponse:
    """A (1 - p)^gamma. Source: F-GRPO (arXiv 2602.06717)."""
    return advantages * (1 - share) ** gamma


@shaper
def confidence_gap(
    advantages: PerResponse,
    share: PerResponse,
    prompt_confidence: PerResponse,
    response_confidence: PerResponse,
    *,
    alpha: NonNegativeFloat = 0.3,
    tail: Annotated[float, Field(gt=0, le=1)] = 0.2,
) -> PerResponse:
    """A + alpha (c(q) - c(o)) where p > 0, else A: only groups that are all wrong stay as they are.

    c is ``tail_confidence`` of the prompt and of the response, over the ``tail`` share of
    their least likely tokens. It may change a sign.
    Source: ARM (arXiv 2602.05281).
    """
    gap = alpha * (prompt_confidence - response_confidence)
    return torch.where(share > 0, advantages + gap, advantages)


@shaper
def given_scale(
    advantages: PerResponse, is_demonstration: ResponseFlags, *, scale: NonNegativeFloat = 0.0
) -> PerResponse:
    """scale A at demonstrations, A elsewhere: at 0 they make the mean and the spread of their
    group, and have no gradient of their own.

    Source: AR3PO (arXiv 2509.25808), reuse without a gradient (0) and by the ratio to the policy
    before the step (1).
    """
    return torch.where(is_demonstration, scale * advantages, advantages)


@shaper
def perplexity(
    advantages: PerResponse,
    mean_logprobs: PerResponse,
    groups: Segments,
    *,
    alpha: NonNegativeFloat = 0.01,
    form: Form = "paper",
) -> PerResponse:
    """A (1 - alpha w), w = (log PPL - mean) / std over the group; log PPL = -``mean_logprobs``.

    The std has the divisor G; where it is below 1e-6, w is 0. A large ``alpha`` may change a sign.
    ``form`` released: mean and std are without what lies more than 1.5 (q3 - q1) below the first
    quartile or above the third, and the factor stays in [0.8, 1.2].
    Source: arXiv 2508.02260; its released code.
    """
    log_ppl = -mean_logprobs.to(advantages.dtype)
    among = torch.ones_like(groups.index, dtype=torch.bool)
    if form == "released":
        whole = WholeResponses(groups.index, among, groups.num, lambda columns: columns)
        low, high = (whole.quantile(log_ppl, share) for share in (0.25, 0.75))
        among = torch.maximum(low - log_ppl, log_ppl - high) <= 1.5 * (high - low)
    usual = Segments(groups.index[among], groups.sum(among))
    mean, std = usual.mean(log_ppl[among]), usual.std(log_ppl[among], ddof=0)
    weight = (log_ppl - groups.broadcast(mean)) / groups.broadcast(std.clamp(min=1e-6))
    weight = torch.where(groups.broadcast(std) < 1e-6, 0, weight)
    factor = 1 - alpha * weight
    return advantages * (factor if form == "paper" else factor.clamp(0.8, 1.2))


def _inside(share: Tensor) -> Tensor:
    return (share > 0) & (share < 1)


def _safe(share: Tensor) -> Tensor:
    """``share``, with 1 in place of 0 so that the branch not taken stays finite."""
    return torch.where(share > 0, share, torch.ones_like(share))


def tail_confidence(
    logprobs: PerToken, index: TokenIndex, num_rows: int, *, tail: float
) -> Float[Tensor, " rows"]:
    """exp(mean logprob of the ``tail`` share of least likely tokens) of each row, in (0, 1].

    Their number is rounded up, at least one. ``index``: the row of each token. A row without tokens
    has 1.
    Source: ARM (arXiv 2602.05281).
    """
    by_value = logprobs.argsort(stable=True)
    order = by_value[index[by_value].argsort(stable=True)]  # by row, least likely first
    row = index[order]
    length = torch.bincount(index, minlength=num_rows)
    rank = Segments(row, length).position()
    wanted = (tail * length.double() - ROUNDING).ceil().long().clamp(min=1)
    kept = logprobs[order].masked_fill(rank >= wanted[row], 0)
    sums = torch.zeros(num_rows, dtype=logprobs.dtype, device=logprobs.device)
    return (sums.index_add(0, row, kept) / wanted).exp()
