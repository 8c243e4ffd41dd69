"""Token advantages: what a response's advantage becomes at each of its tokens.

Chosen by ``token_shaping``, in order, after the shapers of responses. H is the entropy of the
current policy at a token, in nats, over the whole vocabulary and without gradient. A token shaper
is one function here: inputs before the star, named after ``Terms``, knobs after it (see
``choices.py``).
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from megatron_rl.loss.choices import token_shaper
from megatron_rl.loss.shapes import PerResponse, PerToken, TokenIndex
from megatron_rl.loss.whole_responses import WholeResponses


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
