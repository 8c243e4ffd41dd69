"""Which groups and responses take part, and what is added to rewards before estimators see them."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_rl.knobs import Piece
from megatron_rl.loss.segments import Segments
from megatron_rl.loss.shapes import PerResponse, ResponseCounts, ResponseFlags, TokenIndex


class ChosenDemonstrations(Piece):
    """Of a group's demonstrations ``count`` take part: those of the lowest mean entropy, or those
    that make the answer the most likely (of equals the first).

    Source: by entropy ExGRPO (arXiv 2510.02245), by the answer AMPO (arXiv 2510.02227).
    """

    count: PositiveInt = 1
    by: Literal["mean_entropy", "answer_probability"] = "mean_entropy"

    @property
    def reads(self) -> tuple[str, str]:
        return "is_demonstration", self.by

    def rows(
        self, is_demonstration: ResponseFlags, values: PerResponse, groups: Segments
    ) -> ResponseFlags:
        """True for the responses that take part. ``values``: the column ``by``."""
        worst_last = values if self.by == "mean_entropy" else -values
        sampled_last = worst_last.masked_fill(~is_demonstration, torch.inf).argsort(stable=True)
        place = torch.empty_like(sampled_last)  # in its group, in that order
        place[sampled_last] = Segments(groups.index[sampled_last], groups.count).position()
        return ~is_demonstration | (place < self.count)


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
        """``token_ids``: those of all responses, one after another."""
        end = response_tokens.cumsum(0)
        repeated = torch.zeros(response_tokens.shape, dtype=torch.bool, device=token_ids.device)
        longest = int(response_tokens.max()) // 2 if response_tokens.numel() else 0
        for block in range(self.min_block_tokens, min(self.max_block_tokens, longest) + 1):
            rows = torch.nonzero(truncated & ~repeated & (response_tokens >= 2 * block)).flatten()
            if not rows.numel():
                continue
            last = end[rows, None] - 1 - torch.arange(block, device=token_ids.device)
            repeated[rows] = (token_ids[last] == token_ids[last - block]).all(dim=1)
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
