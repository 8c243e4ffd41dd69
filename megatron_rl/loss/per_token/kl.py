"""KL divergence to the reference: per-token estimators and per-response weights."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.loss.choices import kl_weight
from megatron_rl.loss.segments import Segments
from megatron_rl.loss.shapes import PerGroup, PerResponse, PerToken, ResponseFlags


def k1(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """-d, d = ref_logprobs - logprobs: unbiased, of either sign.

    Its gradient has mean 0 over samples: as a loss it pulls nothing back; use it in the reward.
    """
    return logprobs - ref_logprobs


def k2(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """d^2 / 2, d = ref_logprobs - logprobs: biased, with the gradient of KL(policy, reference)."""
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """exp(d) - d - 1, d = ref_logprobs - logprobs: unbiased, never negative, 0 at d = 0.

    No clamp; verl clamps d to [-20, 20] and the result to [-10, 10].
    Source: Schulman 2020; DeepSeekMath (arXiv 2402.03300) eq. 4.
    """
    difference = ref_logprobs - logprobs
    # expm1: near d = 0 the value is d^2 / 2, which exp(d) - 1 would round away.
    return torch.expm1(difference) - difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}  # the last is verl's name


# Of the share d of incorrect responses: strictly decreasing to 0 at 1. Source: APO (arXiv
# 2506.21655) eq. 5, its variants in section 4.4.
CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential": lambda d: -torch.expm1(math.e * (d - 1)),  # e = Euler's number: 0.934 at 0
    "linear": lambda d: 1 - d,
    "cubic": lambda d: 1 - d**3,  # flat at easy prompts, steep at hard ones
}


@kl_weight
def constant(rewards: PerResponse) -> PerResponse:
    """1 for every response."""
    return torch.ones_like(rewards)


@kl_weight
def dads(
    correct: ResponseFlags,
    accuracy: PerGroup,
    groups: Segments,
    *,
    curve: Literal["exponential", "linear", "cubic"] = "exponential",
) -> PerResponse:
    """f(d) for correct responses of groups with d != 0, else 1; d = 1 - accuracy, f the curve.

    Difficulty-adaptive divergence shaping: d is the share of incorrect responses. It touches only
    the KL term.
    Source: APO (arXiv 2506.21655) eq. 4-5.
    """
    share = groups.broadcast(1 - accuracy)
    return torch.where(correct & (share != 0), CURVES[curve](share), torch.ones_like(share))
