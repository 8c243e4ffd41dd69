"""Which groups and responses take part, and what is added to rewards before estimators see them."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.knobs import Piece
from megatron_rl.loss.segments import Segments
from megatron_rl.loss.shapes import PerResponse, ResponseCounts, ResponseFlags, TokenIndex


def not_all_correct(correct: ResponseFlags, groups: Segments) -> ResponseFlags:
    """False for every response of a group whose responses are all correct."""
    return groups.broadcast(groups.sum(correct) < groups.count)


def one_demonstration(
    is_demonstration: ResponseFlags, mean_entropy: PerResponse, groups: Segments
) -> ResponseFlags:
    """False for a group's demonstrations but that of the lowest mean entropy (of equals the first).

    Source: ExGRPO (arXiv 2510.02245), which of the remembered responses is trained on.
    """
    sampled_last = mean_entropy.masked_fill(~is_demonstration, torch.inf).argsort(stable=True)
    order = sampled_last[groups.index[sampled_last].argsort(stable=True)]  # group after group
    keep = ~is_demonstration
    keep[order[groups.count.cumsum(0) - groups.count]] = True
    return keep


class Overlong(Piece):
    """Soft penalty for responses of L tokens close to the limit Lmax (``max_tokens``; null = the
    response limit of the trainer), with a buffer of ``buffer_share`` Lmax.

    ``factor`` times 0 if L <= Lmax - buffer, (Lmax - buffer - L) / buffer up to Lmax, -1 above.
    Source: DAPO (arXiv 2503.14476) eq. 13.
    """

    buffer_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    factor: NonNegativeFloat = 1.0
    max_tokens: PositiveInt | None = None

    def penalty(
        self, response_tokens: ResponseCounts, dtype: torch.dtype, response_limit: int | None = None
    ) -> PerResponse:
        limit = self.max_tokens or response_limit
        if limit is None:
            raise ValueError(
                "reward_shaping.overlong.max_tokens is null: set it or pass response_limit"
            )
        buffer_tokens = self.buffer_share * limit
        start = limit - buffer_tokens
        return self.factor * ((start - response_tokens.to(dtype)) / buffer_tokens).clamp(-1, 0)


def repeated_tail(
    token_ids: TokenIndex,
    response_tokens: ResponseCounts,
    candidates: ResponseFlags,
    *,
    min_block: int,
    max_block: int,
) -> ResponseFlags:
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


class Repetition(Piece):
    """-penalty where a response was cut by the limit and ends in a block written twice.

    Source: CAMPO (MiroMind-M1, arXiv 2507.14683).
    """

    penalty: NonNegativeFloat = 0.1
    min_block_tokens: PositiveInt = 1
    max_block_tokens: PositiveInt = 256

    def of(
        self,
        token_ids: TokenIndex,
        response_tokens: ResponseCounts,
        truncated: ResponseFlags,
        dtype: torch.dtype,
    ) -> PerResponse:
        blocks = {"min_block": self.min_block_tokens, "max_block": self.max_block_tokens}
        repeated = repeated_tail(token_ids, response_tokens, truncated, **blocks)
        return -self.penalty * repeated.to(dtype)


class Curiosity(Piece):
    """Bonus w min(|r| / kappa, alpha B), B = -mean_logprobs (nats), w from ``start`` to ``end``
    with the progress of the run.

    Never negative; 0 at a reward of 0. kappa > 1 and w <= 1 keep the sign of the reward.
    Source: CDE (arXiv 2509.09675), the bonus of the actor.
    """

    reads: ClassVar = ("mean_logprobs", "progress")

    kappa: PositiveFloat = 3.0
    alpha: NonNegativeFloat = 1.0
    start: NonNegativeFloat = 1.0
    end: NonNegativeFloat = 0.0

    def bonus(
        self, rewards: PerResponse, mean_logprobs: PerResponse, progress: float
    ) -> PerResponse:
        weight = self.start + (self.end - self.start) * progress
        return weight * torch.minimum(rewards.abs() / self.kappa, -self.alpha * mean_logprobs)
