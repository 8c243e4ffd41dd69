"""Sections of the configuration that are read apart from the others."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_rl.config.data_names import as_names
from megatron_rl.knobs import Piece

MAX_TAG = 64  # characters that wandb takes for a tag
Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG)]
TrackerName = Literal["wandb", "mlflow", "tensorboard", "trackio", "swanlab"]


class LoggingConfig(Piece):
    console: bool
    trackers: tuple[TrackerName, ...]
    online: bool
    project: Annotated[str, Field(min_length=1)]
    run_name: str | None
    group: str | None
    job_type: str
    tags: tuple[Tag, ...]
    log_samples: NonNegativeInt
    rank_files: bool


class ProfileConfig(Piece):
    steps: tuple[PositiveInt, ...]
    kind: Literal["torch", "memory", "nsys"]


class MismatchLimits(Piece):
    warn_above: PositiveFloat | None
    abort_above: PositiveFloat | None


class NonFiniteConfig(Piece):
    """Optimizer steps whose loss or gradient norm is not finite are always skipped."""

    stop_after: PositiveInt | None
    bundle_step: PositiveInt | None


class EnvironmentConfig(Piece):
    """``env``: what answers a response that has ended a turn."""

    name: str
    tools: tuple[str, ...]
    servers: tuple[str, ...]
    corpus: str | None
    agent: str | None
    tool_parser: str | None
    max_turns: PositiveInt
    max_seconds: PositiveFloat | None
    max_message_characters: PositiveInt
    timeout_s: PositiveFloat
    step_timeout_s: PositiveFloat
    num_workers: PositiveInt
    memory_gib: PositiveFloat

    @property
    def has_turns(self) -> bool:
        return self.name != "single"


GivenNames = Annotated[
    tuple[str, ...] | str | None,
    BeforeValidator(lambda value: None if value is None else as_names(value)),
]


class WarmStartConfig(Piece):
    """Rows of {prompt, response} that the first steps of a run train on."""

    steps: NonNegativeInt
    data: GivenNames
    prompt: str
    response: str
    rows_per_step: PositiveInt
    peak_learning_rate: Annotated[float, Field(gt=0, le=1e30)] | None


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
