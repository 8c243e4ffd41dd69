"""Which groups and responses take part, and what is added to rewards before anything is
estimated."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss.segments import Segments


def informative_groups(
    correct: Bool[Tensor, " responses"], groups: Segments
) -> Bool[Tensor, " groups"]:
    """0 < sum(correct) < G: both outcomes seen.

    Source: DAPO (arXiv 2503.14476) eq. 11, dynamic sampling.
    """
    right = groups.sum(correct)
    return (right > 0) & (right < groups.count)


def not_all_correct(
    correct: Bool[Tensor, " responses"], groups: Segments
) -> Bool[Tensor, " responses"]:
    """False for every response of a group whose responses are all correct."""
    return groups.broadcast(groups.sum(correct) < groups.count)


def overlong_penalty(
    response_tokens: Int[Tensor, " responses"],
    dtype: torch.dtype,
    *,
    max_tokens: int,
    buffer_tokens: float,
) -> Float[Tensor, " responses"]:
    """0 if L <= max - buffer, (max - buffer - L) / buffer up to max, -1 above.

    Source: DAPO (arXiv 2503.14476) eq. 13.
    """
    start = max_tokens - buffer_tokens
    return ((start - response_tokens.to(dtype)) / buffer_tokens).clamp(-1, 0)


def repeated_tail(
    token_ids: Int[Tensor, " tokens"],
    response_tokens: Int[Tensor, " responses"],
    candidates: Bool[Tensor, " responses"],
    *,
    min_block: int,
    max_block: int,
) -> Bool[Tensor, " responses"]:
    """True where a candidate ends in a block of min_block to max_block tokens written twice.

    The tokens are those of all responses, one after another.
    """
    end = response_tokens.cumsum(0)
    repeated = torch.zeros(response_tokens.shape, dtype=torch.bool, device=token_ids.device)
    longest = int(response_tokens.max()) // 2 if response_tokens.numel() else 0
    for block in range(min_block, min(max_block, longest) + 1):
        rows = torch.nonzero(candidates & ~repeated & (response_tokens >= 2 * block)).flatten()
        if not rows.numel():
            continue
        last = end[rows, None] - 1 - torch.arange(block, device=token_ids.device)
        repeated[rows] = (token_ids[last] == token_ids[last - block]).all(dim=1)
    return repeated


def repetition_penalty(
    token_ids: Int[Tensor, " tokens"],
    response_tokens: Int[Tensor, " responses"],
    truncated: Bool[Tensor, " responses"],
    dtype: torch.dtype,
    *,
    penalty: float,
    min_block: int,
    max_block: int,
) -> Float[Tensor, " responses"]:
    """-penalty where the response was cut by the limit and its tail repeats itself, else 0.

    Source: CAMPO (MiroMind-M1, arXiv 2507.14683).
    """
    repeated = repeated_tail(
        token_ids, response_tokens, truncated, min_block=min_block, max_block=max_block
    )
    return -penalty * repeated.to(dtype)


def curiosity_bonus(
    rewards: Float[Tensor, " responses"],
    mean_logprobs: Float[Tensor, " responses"],
    progress: float,
    *,
    kappa: float,
    alpha: float,
    start: float,
    end: float,
) -> Float[Tensor, " responses"]:
    """w min(|r| / kappa, alpha B), B = -mean_logprobs (nats), w from start to end by progress.

    Never negative; 0 at a reward of 0. kappa > 1 and w <= 1 keep the sign of the reward.
    Source: CDE (arXiv 2509.09675), the bonus of the actor.
    """
    weight = start + (end - start) * progress
    return weight * torch.minimum(rewards.abs() / kappa, -alpha * mean_logprobs)
