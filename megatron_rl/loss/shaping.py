"""Advantage shaping: factors applied to estimated advantages. Every factor is >= 0, so a sign never changes.

p is the accuracy of the group; omega the mean reward of the batch clipped to [0, 1].
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss.segments import Segments


def stcr(
    advantages: Float[Tensor, " responses"],
    correct: Bool[Tensor, " responses"],
    response_tokens: Int[Tensor, " responses"],
    groups: Segments,
    *,
    mu: float = 1.0001,
    only_negative: bool = False,
) -> Float[Tensor, " responses"]:
    """A_i alpha_i, alpha_i = 2 - mu^(Lbar - L_i) if incorrect and L_i > Lbar, else 1; alpha in [1, 2).

    Lbar is the mean length of the correct responses of the segment (group, or whole batch); without any alpha is 1. It
    multiplies whatever the sign; ``only_negative`` leaves positive advantages alone.
    Source: APO (arXiv 2506.21655) eq. 6-7.
    """
    lengths = response_tokens.to(advantages.dtype)
    num = groups.sum(correct)
    mean = groups.broadcast(groups.sum(lengths * correct) / num.clamp(min=1))
    longer = ~correct & groups.broadcast(num > 0) & (lengths > mean)
    if only_negative:
        longer = longer & (advantages < 0)
    exponent = torch.where(longer, mean - lengths, torch.zeros_like(lengths))
    return advantages * (2 - mu**exponent)


def ddas(
    advantages: Float[Tensor, " responses"], accuracy: Float[Tensor, " responses"], omega: Float[Tensor, ""]
) -> Float[Tensor, " responses"]:
    """omega/2 A / sqrt(p) + (1 - omega)/2 A / sqrt(1 - p); unchanged where p is 0 or 1. Source: A-GRAE (arXiv 2602.05548) eq. 12."""
    hard, easy = hard_focused(advantages, accuracy), easy_focused(advantages, accuracy)
    return torch.where(_inside(accuracy), omega * hard + (1 - omega) * easy, advantages)


def ass(advantages: Float[Tensor, " responses"], omega: Float[Tensor, ""], *, alpha: float = 1.0) -> Float[Tensor, " responses"]:
    """A min(1, omega / alpha) if A > 0 else A. Source: A-GRAE (arXiv 2602.05548) eq. 13 (alpha 1; 0.5 for multimodal models)."""
    return torch.where(advantages > 0, advantages * (omega / alpha).clamp(max=1), advantages)


def sign_scale(advantages: Float[Tensor, " responses"], *, positive: float = 1.0, negative: float = 1.0) -> Float[Tensor, " responses"]:
    """positive A if A > 0, negative A if A < 0. Source: A-GRAE (arXiv 2602.05548) section 4.1 (positive 10 or 0.1)."""
    return torch.where(advantages > 0, positive * advantages, negative * advantages)


def hard_focused(advantages: Float[Tensor, " responses"], accuracy: Float[Tensor, " responses"]) -> Float[Tensor, " responses"]:
    """0.5 A / sqrt(p); unchanged where p is 0 or 1. Source: A-GRAE (arXiv 2602.05548) section 4.1."""
    return torch.where(_inside(accuracy), 0.5 * advantages * _safe(accuracy).rsqrt(), advantages)


def easy_focused(advantages: Float[Tensor, " responses"], accuracy: Float[Tensor, " responses"]) -> Float[Tensor, " responses"]:
    """0.5 A / sqrt(1 - p); unchanged where p is 0 or 1. Source: A-GRAE (arXiv 2602.05548) section 4.1."""
    return torch.where(_inside(accuracy), 0.5 * advantages * _safe(1 - accuracy).rsqrt(), advantages)


def focal(
    advantages: Float[Tensor, " responses"], accuracy: Float[Tensor, " responses"], *, gamma: float = 0.5
) -> Float[Tensor, " responses"]:
    """A (1 - p)^gamma. Source: F-GRPO (arXiv 2602.06717)."""
    return advantages * (1 - accuracy) ** gamma


def _inside(accuracy: Tensor) -> Tensor:
    return (accuracy > 0) & (accuracy < 1)


def _safe(share: Tensor) -> Tensor:
    """``share``, with 1 in place of 0 so that the branch not taken stays finite."""
    return torch.where(share > 0, share, torch.ones_like(share))
