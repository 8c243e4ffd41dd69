"""How sure a policy is of what it finds least likely."""

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss.shapes import PerToken, TokenIndex

ROUNDING = 1e-9  # share * tokens that is whole but for its last bit is not rounded up


def tail_confidence(
    logprobs: PerToken, index: TokenIndex, num_rows: int, *, tail: float
) -> Float[Tensor, " rows"]:
    """exp(mean logprob of the ``tail`` share of least likely tokens) of each row, in (0, 1].

    Their number is rounded up, at least one. ``index``: the row of each token. A row without tokens
    has 1.
    Source: ARM (arXiv 2602.05281).
    """
    by_value = logprobs.argsort(stable=True)
    order = by_value[index[by_value].argsort(stable=True)]  # by row, least likely first
    row = index[order]
    length = torch.zeros(num_rows, dtype=torch.int64, device=index.device)
    length = length.index_add(0, index, torch.ones_like(index))
    # 0, 1, 2, ... within each row: the place less that of the row's first token.
    rank = torch.arange(len(order), device=index.device) - (length.cumsum(0) - length)[row]
    wanted = (tail * length.double() - ROUNDING).ceil().long().clamp(min=1)
    kept = logprobs[order].masked_fill(rank >= wanted[row], 0)
    sums = torch.zeros(num_rows, dtype=logprobs.dtype, device=logprobs.device)
    return (sums.index_add(0, row, kept) / wanted).exp()
