"""How states become the distribution of the next token, and what is wanted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

Entropy = Literal["none", "value", "grad"]


@dataclass(frozen=True)
class Head:
    """How states become a distribution, and what is wanted of it beside logprobs: the settings of
    ``response_logprobs``, and ``top_k`` tokens (0: none). ``temperature``: one, or that of each
    token."""

    temperature: float | Float[Tensor, " t"]
    vocab_size: int
    chunk_tokens: int
    group: dist.ProcessGroup | None
    entropy: Entropy
    top_k: int = 0

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def divisor(self, rows: slice) -> float | Float[Tensor, " rows"]:
        """What divides the logits of the tokens ``rows``."""
        return self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature

    def scale_(self, logits: Tensor, rows: slice) -> None:
        """Divides ``logits`` of the tokens ``rows`` in place."""
        if isinstance(self.temperature, Tensor):
            logits.div_(self.temperature[rows, None])
        elif self.temperature != 1.0:
            logits.div_(self.temperature)
