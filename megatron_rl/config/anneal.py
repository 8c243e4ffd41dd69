"""``rollout.anneal``: a temperature that falls within a response."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from megatron_rl.annealing import Annealing
from megatron_rl.knobs import Piece


class AnnealConfig(Piece):
    """See ``Annealing``; off where ``start`` is null."""

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
        values = self.model_dump(exclude={"policy"})
        return Annealing(**values, in_policy=self.policy == "annealed")
