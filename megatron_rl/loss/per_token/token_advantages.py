"""Token advantages: what a response's advantage becomes at each of its tokens.

Chosen by ``token_shaping``, in order, after the shapers of responses. H is the entropy of the
current policy at a token, in nats, over the whole vocabulary and without gradient. A token shaper
is one function here: inputs before the star, named after ``Terms``, knobs after it (see
``choices.py``).
"""

from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from megatron_rl.loss.choices import token_shaper
from megatron_rl.loss.per_response.advantages import centered, zscore
from megatron_rl.loss.segments import segments_of
from megatron_rl.loss.shapes import PerResponse, PerToken, TokenIndex
from megatron_rl.loss.whole_responses import WholeResponses

Discount = Annotated[float, Field(ge=0, le=1)]
TurnNorm = Literal["std", "none"]


@token_shaper
def zero_variance(
    advantages: PerToken,
    entropy: PerToken,
    group_accuracy: PerResponse,
    response_index: TokenIndex,
    responses: WholeResponses,
    *,
    alpha: NonNegativeFloat = 0.1,
) -> PerToken:
    """A where the group has both outcomes; alpha H_t where all of it is correct; else
    -alpha (max_k H_k - H_t), the maximum over the same response.

    It replaces whatever A was in groups of one outcome.
    Source: RL-ZVP (arXiv 2509.21880) eq. 5.
    """
    accuracy = group_accuracy[response_index]
    missed = responses.maximum(entropy) - entropy
    shaped = torch.where(accuracy == 1, alpha * entropy, advantages)
    return torch.where(accuracy == 0, -alpha * missed, shaped)


@token_shaper
def teacher(
    advantages: PerToken,
    logprobs: PerToken,
    teacher_logprobs: PerToken,
    *,
    coef: NonNegativeFloat = 1.0,
) -> PerToken:
    """A - coef (log p - log q), p of the current policy at the sampled token and q of its teacher.

    Where the ratio to the sampler corrects for old tokens, the mean of its gradient is that of
    coef KL(p, q) at each prefix. Source: GKD (arXiv 2306.13649) on the policy's own responses.
    """
    return advantages - coef * (logprobs.detach() - teacher_logprobs)


@token_shaper
def turn_discount(
    advantages: PerToken, later_turns: TokenIndex, *, gamma: Discount = 0.95
) -> PerToken:
    """gamma^k A, k the turns of the response that follow the token's.

    It is the advantage of the return at the turn, for a reward at the end, with one baseline.
    Source: the discounted return of GiGPO (arXiv 2505.10978) section 3.2, without its states.
    """
    return advantages * gamma ** later_turns.to(advantages.dtype)


@token_shaper
def gigpo(
    advantages: PerToken,
    turn_advantages: PerToken,
    *,
    omega: NonNegativeFloat = 1.0,
    gamma: Discount = 0.95,
    turn_norm: TurnNorm = "std",
) -> PerToken:
    """A + omega A^S, A^S that of the token's turn (``advantages_of_turns``, by ``gamma`` and
    ``turn_norm``). Source: GiGPO (arXiv 2505.10978) eq. 8."""
    return advantages + omega * turn_advantages


def advantages_of_turns(
    rewards: Float[Tensor, " turns"],
    later: Int[Tensor, " turns"],
    states: Int[Tensor, " turns"],
    gamma: float,
    norm: TurnNorm,
) -> Float[Tensor, " turns"]:
    """(R_t - mean R) / F, R_t = gamma^later r; mean and F over the turns that began in one state.

    F is the std with divisor n - 1, and 1e-6, or 1 (``none``); the only turn of a state, and one of
    several equal ones, has 0. Source: GiGPO (arXiv 2505.10978) eq. 7.

    Args:
        rewards: Of the response of each turn.
        later: How many of its turns follow.
        states: Numbers of what the policy had been told; of one prompt alone.
    """
    returns = rewards * gamma ** later.to(rewards.dtype)
    groups = segments_of(states)
    return centered(returns, groups) if norm == "none" else zscore(returns, groups, 1e-6, 1)


@token_shaper
def entropy_bonus(
    advantages: PerToken,
    entropy: PerToken,
    *,
    alpha: NonNegativeFloat = 0.4,
    kappa: PositiveFloat = 2.0,
) -> PerToken:
    """A + min(alpha H_t, |A| / kappa); kappa > 1 keeps the sign of A.

    Source: arXiv 2506.14758, entropy-based advantage shaping.
    """
    return advantages + torch.minimum(alpha * entropy, advantages.abs() / kappa)


@token_shaper
def position_bonus(
    advantages: PerToken,
    relative_place: PerToken,
    *,
    alpha: NonNegativeFloat = 0.1,
    steepness: PositiveFloat = 15.0,
) -> PerToken:
    """A + sign(A) min(alpha s(steepness (x - 1/2)), |A| / 2), s the logistic function, x = t / L.

    Source: arXiv 2508.02260; s and the bound by |A| / 2 are those of its released code.
    """
    bonus = alpha * torch.sigmoid(steepness * (relative_place - 0.5))
    return advantages + advantages.sign() * torch.minimum(bonus, advantages.abs() / 2)
