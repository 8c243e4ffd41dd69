"""A reward that the policy gives itself, by one token after a response, taught by verdicts."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def self_reward_loss(
    logprobs: Float[Tensor, " ends"],
    start: Float[Tensor, ""],
    correct: Bool[Tensor, " ends"],
    *,
    beta: float,
) -> Float[Tensor, " ends"]:
    """(r_s - correct)^2, r_s = beta (logprob of the token after the response - start).

    ``start``: the mean of those logprobs at the start of the run, a constant.
    Source: LaSeR (arXiv 2510.14943).
    """
    reward = beta * (logprobs - start.to(logprobs.dtype))
    return (reward - correct.to(logprobs.dtype)).square()


def agrees(
    logprobs: Float[Tensor, " ends"],
    start: Float[Tensor, ""],
    correct: Bool[Tensor, " ends"],
    *,
    beta: float,
) -> Bool[Tensor, " ends"]:
    """Where r_s > 1/2 says what the verdict says."""
    return (beta * (logprobs.detach() - start.to(logprobs.dtype)) > 0.5) == correct
