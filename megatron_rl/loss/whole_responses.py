"""Order statistics of the loss tokens of each response, wherever its tokens lie."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss.shapes import PerToken, TokenIndex, TokenMask

SequenceGather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class WholeResponses:
    """Of the tokens of a micro-batch: which response each belongs to, and which take part.

    ``gather`` puts the columns of all ranks that share a response side by side (context
    parallelism): ``[k, t] -> [k, T]``, where columns of NaN are padding. It is collective and has
    no gradient, so what is read here is detached.
    """

    index: TokenIndex
    loss_mask: TokenMask
    num_responses: int
    gather: SequenceGather

    def quantile(self, values: PerToken, share: float) -> PerToken:
        """The ``share``-quantile of a response's loss tokens, at each of its tokens.

        Interpolated linearly: between the values of rank floor(x) and floor(x) + 1, counted from 0,
        x = share (L - 1).
        """
        index, values = self._everywhere(values)
        by_value = values.argsort(stable=True)
        order = by_value[index[by_value].argsort(stable=True)]  # by response, then by value
        ranked = values[order]
        # One more than there are responses: for tokens that take no part, see ``_everywhere``.
        count = torch.zeros(self.num_responses + 1, dtype=torch.int64, device=index.device)
        count = count.index_add(0, index, torch.ones_like(index))
        start = count.cumsum(0) - count
        place = quantile_place(count, share)
        below = place.floor().long()
        above = torch.minimum(below + 1, (count - 1).clamp(min=0))
        # A response without loss tokens has no value, and must not read behind the last one.
        last = max(ranked.numel() - 1, 0)
        low, high = (ranked[(start + rank).clamp(max=last)[self.index]] for rank in (below, above))
        return low + (place - below).to(low.dtype)[self.index] * (high - low)

    def maximum(self, values: PerToken) -> PerToken:
        """The largest value of a response's loss tokens, at each of its tokens."""
        index, values = self._everywhere(values)
        none_yet = values.new_full((self.num_responses + 1,), -torch.inf)
        return none_yet.scatter_reduce(0, index, values, "amax")[self.index]

    def _everywhere(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(response, value) of the tokens of all ranks that share a response.

        Tokens that take no part belong to one additional response, after the others.
        """
        own = self.index.to(values.dtype).masked_fill(~self.loss_mask, torch.nan)
        index, everything = self.gather(torch.stack([own, values.detach()]))
        return index.nan_to_num(nan=self.num_responses).long(), everything


def quantile_place(count: Int[Tensor, " *any"], share: float) -> Float[Tensor, " *any"]:
    """share (count - 1), between the ranks 0 and count - 1; 0 of nothing. In float64."""
    return share * (count - 1).clamp(min=0).double()


def num_up_to_quantile(count: Int[Tensor, " *any"], share: float) -> Int[Tensor, " *any"]:
    """How many of ``count`` different values are not above their ``share``-quantile."""
    return torch.where(count > 0, quantile_place(count, share).floor().long() + 1, 0)
