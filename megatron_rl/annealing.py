"""A temperature that falls within a response: one formula for the sampler and for the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from megatron_rl.knobs import Piece

Number = float | Shaped[Tensor, " n"]


@dataclass(frozen=True)
class Annealing:
    """The temperature of each token of a response, by the number t of response tokens before it:

        1 where t < plain_tokens, else max(1 + start - exp(t / decay_tokens), end)

    ``decay_tokens`` is that of step 1 of a run; every later step adds ``decay_growth``, up to
    ``decay_limit``. ``in_policy``: the logprobs of the policy are of the same distributions, not of
    those at temperature 1.

    Source: Exploratory Annealed Decoding (arXiv 2510.05251).
    Example: of ``Annealing(1.2, 0.1, decay_tokens=500.0, plain_tokens=10)`` the temperatures at
    t = 0, 10, 200, 400 are 1, 1.1798, 0.7082, 0.1.
    """

    start: float
    end: float
    decay_tokens: float
    plain_tokens: int
    decay_growth: float = 0.0
    decay_limit: float = math.inf
    in_policy: bool = True

    def at(self, step: int) -> Annealing:
        """That of one step, counted from 1."""
        grown = self.decay_tokens + self.decay_growth * (step - 1)
        return replace(self, decay_tokens=min(grown, self.decay_limit), decay_growth=0.0)

    def of_positions(self, positions: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """``positions``: t of each token."""
        return temperatures(positions, self.start, self.end, self.decay_tokens, self.plain_tokens)

    def of_lengths(self, lengths: Int[Tensor, " responses"]) -> Float[Tensor, " tokens"]:
        """Of all tokens of some responses, one response after the other.

        Example: ``lengths=[2, 1]`` gives the temperatures at t = 0, 1, 0.
        """
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
        return self.of_positions(positions)


def temperatures(
    positions: Int[Tensor, " n"],
    start: Number,
    end: Number,
    decay_tokens: Number,
    plain_tokens: Number,
) -> Float[Tensor, " n"]:
    """See ``Annealing``, whose fields may be those of each position; float32, computed in float64
    so that every device has the same."""
    falling = 1 + start - (positions.double() / decay_tokens).exp()
    return torch.where(positions < plain_tokens, 1.0, falling.clamp(min=end)).float()


def policy_temperatures(
    annealing: Annealing | None, lengths: Int[np.ndarray, " responses"]
) -> Float[Tensor, " tokens"] | None:
    """Of the tokens of responses of such lengths, for the policy; None: all have its own."""
    if annealing is None or not annealing.in_policy:
        return None
    return annealing.of_lengths(torch.from_numpy(lengths))


class AnnealConfig(Piece):
    """``rollout.anneal``: see ``Annealing``; off where ``start`` is null."""

    start: PositiveFloat | None
    end: Annotated[float, Field(ge=0.01)]  # the gradient of a logit is divided by it
    decay_tokens: PositiveFloat
    decay_growth: NonNegativeFloat
    decay_limit: PositiveFloat
    plain_tokens: NonNegativeInt
    policy: Literal["annealed", "plain"]

    @property
    def schedule(self) -> Annealing | None:
        """That of a run; None where it is off."""
        if self.start is None:
            return None
        return Annealing(**self.model_dump(exclude={"policy"}), in_policy=self.policy == "annealed")
