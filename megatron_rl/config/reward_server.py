"""``reward.server``: a model behind a server that scores responses."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.knobs import Piece


class RewardServerConfig(Piece):
    """``judge``: a language model writes a score; ``model``: a reward model gives a number."""

    kind: Literal["judge", "model"]
    url: str = Field(pattern="^https?://[^@]+$")  # a password would be in the run's files
    model: str = Field(min_length=1)
    api_key_variable: str | None
    template: str
    concurrent_requests: PositiveInt
    num_tries: PositiveInt
    timeout_s: PositiveFloat
    pattern: str | None
    max_score: PositiveFloat | None
    temperature: NonNegativeFloat | None
    max_tokens: PositiveInt | None
    correct_above: float | None

    @model_validator(mode="after")
    def _whole(self) -> RewardServerConfig:
        if "{response}" not in self.template:
            raise ValueError("template has no place for the response; write {response} there")
        of_judge = (self.pattern, self.max_score, self.temperature, self.max_tokens)
        if self.kind == "model":
            if set(of_judge) != {None} or self.correct_above is None:
                raise ValueError(
                    "kind model: set pattern, max_score, temperature and max_tokens to null, and"
                    " correct_above to the score above which a response is correct"
                )
        elif None in of_judge or self.correct_above is not None:
            raise ValueError(
                "kind judge: give pattern, max_score, temperature and max_tokens, and set"
                " correct_above to null"
            )
        elif num_groups("pattern", str(self.pattern)) != 1:
            raise ValueError(
                f"pattern = {self.pattern!r}: put one pair of brackets around the score"
            )
        return self


def num_groups(key: str, pattern: str) -> int:
    """Groups of the regular expression. Raises ValueError when it is none."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ValueError(
            f"{key} = {pattern!r}: not a regular expression ({error}); correct it"
        ) from error
