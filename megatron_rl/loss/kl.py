"""KL divergence to the reference: per-token estimators and per-response weights."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.loss.segments import Segments


def k1(logprobs: Float[Tensor, " tokens"], ref_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-d with d = ref_logprobs - logprobs: unbiased, of either sign. Its gradient has mean 0 over samples, so as a loss it
    does not pull the policy back; use it in the reward."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, " tokens"], ref_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """d^2 / 2 with d = ref_logprobs - logprobs: biased, its gradient is that of KL(policy, reference)."""
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: Float[Tensor, " tokens"], ref_logprobs: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """exp(d) - d - 1 with d = ref_logprobs - logprobs: unbiased and never negative; 0 with zero gradient at d = 0. No clamp.

    Source: Schulman 2020; DeepSeekMath (arXiv 2402.03300) eq. 4. verl clamps d to [-20, 20] and the result to [-10, 10].
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}


def dads_exponential(incorrect_share: Float[Tensor, " *any"]) -> Float[Tensor, " *any"]:
    """1 - exp(e (d - 1)), e = Euler's number: strictly decreasing, 0.934 at 0 and 0 at 1. Source: APO
    (arXiv 2506.21655) eq. 5."""
    return -torch.expm1(math.e * (incorrect_share - 1))


def dads_linear(incorrect_share: Float[Tensor, " *any"]) -> Float[Tensor, " *any"]:
    """1 - d: 1 at 0 and 0 at 1. Source: APO's variants (arXiv 2506.21655, section 4.4)."""
    return 1 - incorrect_share


def dads_cubic(incorrect_share: Float[Tensor, " *any"]) -> Float[Tensor, " *any"]:
    """1 - d^3: flat at easy prompts, steep at hard ones. Source: APO's variants (arXiv 2506.21655, section 4.4)."""
    return 1 - incorrect_share**3


CURVES = {"exponential": dads_exponential, "linear": dads_linear, "cubic": dads_cubic}


def dads(
    correct: Bool[Tensor, " responses"], accuracy: Float[Tensor, " groups"], groups: Segments, *, curve: str
) -> Float[Tensor, " responses"]:
    """f(d) for correct responses of groups with d != 0, else 1; d = 1 - accuracy, the share of incorrect responses.

    Source: APO (arXiv 2506.21655) eq. 4-5, difficulty-adaptive divergence shaping. It touches only the KL term.
    """
    share = groups.broadcast(1 - accuracy)
    return torch.where(correct & (share != 0), CURVES[curve](share), torch.ones_like(share))
