"""``warm_start``: supervised steps before those of the rollouts."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from megatron_rl.config.data_names import as_names
from megatron_rl.knobs import Piece


def _names(value: Any) -> Any:
    return None if value is None else as_names(value)


GivenNames = Annotated[tuple[str, ...] | str | None, BeforeValidator(_names)]


class WarmStartConfig(Piece):
    """Rows of {prompt, response} that the first steps of a run train on."""

    steps: NonNegativeInt
    data: GivenNames
    prompt: str
    response: str
    rows_per_step: PositiveInt
    peak_learning_rate: Annotated[float, Field(gt=0, le=1e30)] | None
