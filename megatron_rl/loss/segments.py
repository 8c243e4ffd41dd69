"""Reductions over ragged segments of a flat vector: responses of a prompt, tokens of a response."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def lifted(values: Tensor) -> Tensor:
    """float64 stays, every other dtype becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def where_correct(
    correct: Bool[Tensor, " items"], positive: float, negative: float, dtype: torch.dtype
) -> Float[Tensor, " items"]:
    """``positive`` where ``correct``, else ``negative``, in ``dtype``."""
    # torch.where of two numbers would give float32, whatever the batch is in.
    full = torch.full(correct.shape, negative, dtype=dtype, device=correct.device)
    return full.masked_fill(correct, positive)


@dataclass(frozen=True)
class Segments:
    """Which segment each item belongs to; segments are in ascending order of their ids.

    Example: ids [7, 7, 3] give ``index == [1, 1, 0]`` and ``count == [1, 2]``.
    """

    index: Int[Tensor, " items"]
    count: Int[Tensor, " segments"]

    @property
    def num(self) -> int:
        return self.count.numel()

    def sum(self, values: Shaped[Tensor, " items"]) -> Shaped[Tensor, " segments"]:
        """Sum per segment; booleans are counted in int64."""
        if values.dtype == torch.bool:
            values = values.long()
        zeros = torch.zeros(self.num, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.index, values)

    def mean(self, values: Float[Tensor, " items"]) -> Float[Tensor, " segments"]:
        """Mean per segment."""
        return self.sum(values) / self.count

    def spread(self, values: Float[Tensor, " items"]) -> Float[Tensor, " segments"]:
        """max - min per segment, exactly 0 where all values are equal."""
        start = torch.zeros(self.num, dtype=values.dtype, device=values.device)
        highest = start.scatter_reduce(0, self.index, values, "amax", include_self=False)
        lowest = start.scatter_reduce(0, self.index, values, "amin", include_self=False)
        return highest - lowest

    def broadcast(self, per_segment: Shaped[Tensor, " segments"]) -> Shaped[Tensor, " items"]:
        """The segment's value at each of its items."""
        return per_segment[self.index]

    def std(self, values: Float[Tensor, " items"], ddof: int) -> Float[Tensor, " segments"]:
        """sqrt(sum((x - mean)^2) / (count - ddof)), two passes; 0 for a segment of ddof items."""
        deviation = values - self.broadcast(self.mean(values))
        return (self.sum(deviation.square()) / (self.count - ddof).clamp(min=1)).sqrt()

    def position(self) -> Int[Tensor, " items"]:
        """0, 1, 2, ... within each segment, in item order."""
        order = torch.argsort(self.index, stable=True)  # items, segment after segment
        start = self.count.cumsum(0) - self.count
        place = torch.arange(self.index.numel(), device=self.index.device)
        position = torch.empty_like(self.index)
        position[order] = place - start[self.index[order]]
        return position


def segments_of(ids: Int[Tensor, " items"]) -> Segments:
    """Segments of equal id, which need not be contiguous."""
    _, index, count = torch.unique(ids, return_inverse=True, return_counts=True)
    return Segments(index, count)


def group_accuracy(
    correct: Bool[Tensor, " items"], ids: Int[Tensor, " items"]
) -> Float[Tensor, " items"]:
    """The share of correct items among those of the same id, at each of them; float32."""
    groups = segments_of(ids)
    return groups.broadcast(groups.mean(correct.float()))
