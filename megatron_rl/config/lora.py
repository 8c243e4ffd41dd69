"""``model.lora``: which adapters are trained in place of the weights."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.knobs import Piece


class LoraConfig(Piece):
    """Low-rank adapters of linear layers: W x + scale B A x, with W as it was."""

    rank: PositiveInt | None
    alpha: PositiveFloat
    rslora: bool
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(min_length=1)]
    path: str | None

    @property
    def scale(self) -> float:
        assert self.rank is not None, "without a rank there are no adapters"
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
