"""Tokens whose logprob and advantage rise together: what most lowers the entropy of the policy.

The covariance of a token is (logp - mean)(A - mean), means over the N loss tokens of a minibatch;
logp of the policy before the update, A of the response. Which tokens are chosen is known before the
first backward (``signals/covariance.py``), by their places among all tokens of the step: the same
for every layout and cut into micro-batches. Source: arXiv 2505.22617 eq. 10.
"""

from typing import Annotated

import torch
from jaxtyping import Int
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from megatron_rl.loss.choices import policy_loss
from megatron_rl.loss.per_token.policy_losses import ppo_clip, ratio_of
from megatron_rl.loss.shapes import PerToken, TokenIndex, TokenMask

Share = Annotated[float, Field(ge=0, le=1)]
Places = Int[Tensor, " chosen"]


@policy_loss(clips=True)
def clip_cov(
    log_ratio: PerToken,
    advantages: PerToken,
    token_place: TokenIndex,
    chosen_places: Places,
    *,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    low: NonNegativeFloat = 1.0,
    high: NonNegativeFloat = 1.0,
) -> PerToken:
    """``ppo_clip``, but 0 at floor(share N) tokens drawn among those of a covariance in
    [cov_low, cov_high].

    Source: Clip-Cov (arXiv 2505.22617) eq. 11-12; the bounds of the ratio are its released run's.
    """
    loss = ppo_clip(log_ratio, advantages, low=low, high=high)
    return loss.masked_fill(are_among(token_place, chosen_places), 0)


@policy_loss()
def kl_cov(
    log_ratio: PerToken,
    advantages: PerToken,
    token_place: TokenIndex,
    chosen_places: Places,
    *,
    share: Share = 2e-3,
    beta: NonNegativeFloat = 1.0,
) -> PerToken:
    """-rho A, and beta |log rho| more at the floor(share N) tokens of the largest covariance.

    |log rho| stands for KL(old, current); at rho = 1 it has no gradient.
    Source: KL-Cov (arXiv 2505.22617) eq. 13-14, the penalty as in its listing 1.
    """
    penalty = beta * log_ratio.abs() * are_among(token_place, chosen_places)
    return penalty - ratio_of(log_ratio) * advantages


def covariances(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """The covariance at each loss token of a minibatch."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def choose(covariance: PerToken, keys: PerToken, share: float, low: float, high: float) -> Places:
    """The floor(share N) tokens of the smallest keys, of equal ones the first, or as many as there
    are, with a covariance in [low, high]."""
    eligible = ((covariance >= low) & (covariance <= high)).nonzero().flatten()
    by_key = eligible[keys[eligible].argsort(stable=True)]
    return by_key[: int(share * len(covariance))]


def are_among(token_place: TokenIndex, chosen: Places) -> TokenMask:
    """Whether each place is in ``chosen``: sorted, after a -1, so that it is never empty."""
    nearest = torch.searchsorted(chosen, token_place, right=True) - 1
    return chosen[nearest] == token_place
