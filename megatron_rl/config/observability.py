"""The sections that watch a run: logs, traces, and the numbers that warn or stop."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

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
