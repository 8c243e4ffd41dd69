"""How hidden states become a distribution over tokens."""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

Entropy = Literal["none", "value", "grad"]  # "value": without gradient


@dataclass(frozen=True)
class Head:
    """How states become a distribution, and what is wanted of it beside logprobs."""

    temperature: float | Float[Tensor, " t"]  # divides the logits: one, or that of each token
    vocab_size: int  # rows of the output layer from here on are padding
    chunk_tokens: int  # tokens whose logits are in memory at a time
    # Ranks that have blocks of the output layer's rows, in rank order; None: one block.
    group: dist.ProcessGroup | None
    entropy: Entropy = "none"
    top_k: int = 0  # how many of the most likely tokens are wanted; 0: none
    # The only ids with a probability at each token, -1 in unused slots; a row of -1 keeps the whole
    # vocabulary, as None does for all tokens.
    kept: Int[Tensor, "t num_kept"] | None = None
    # Ids whose logprobs are wanted, -1 in unused slots; with them ``top_k`` is not used.
    likely: Int[Tensor, "t num_likely"] | None = None

    @property
    def num_wanted(self) -> int:
        """Tokens beside the target whose logprobs are wanted."""
        return self.top_k if self.likely is None else self.likely.shape[1]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def divisor(self, rows: slice) -> float | Float[Tensor, " rows"]:
        """What divides the logits of the tokens ``rows``."""
        return self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
