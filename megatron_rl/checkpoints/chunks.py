"""Arrays of a checkpoint and the rectangles in which ranks write and read them.

A rank's part of an array is a box of it; what the rank writes or reads is a range of the flattened
box, for that is how a distributed optimizer cuts parameters and how any number of ranks share a
tensor evenly. The format knows rectangles only, and every range is a few of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_rl.config.model_config import format_name

Range = tuple[int, int]  # begin and end, as in Python's range
_Rectangle = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, first element


@dataclass(frozen=True)
class Box:
    """A rectangle of an array: where it begins, and its sizes.

    ``first``: number of its first element in the rank's own tensor, flattened. The elements of the
    box follow one another there. ``suffix``: of the key, where the tensor is several arrays, and
    ``array_shape`` of that one.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int = 0
    suffix: str = ""
    array_shape: tuple[int, ...] | None = None


class Chunk(NamedTuple):
    """What is stored as one tensor: the rectangle of an array at ``offsets``, with ``sizes``.

    ``dtype``: as in "float32". A chunk goes through JSON as the list of its fields.
    """

    key: str
    array_shape: Sequence[int]
    dtype: str
    offsets: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class ArrayLocation:
    """The place of a rank's tensor in the array ``key`` of a checkpoint.

    ``may_differ``: the array of the checkpoint may have another shape (a vocabulary padded for
    another layout); what it lacks is zero.
    """

    key: str
    array_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    may_differ: bool = False

    def chunks(self, start: int, end: int) -> Iterator[tuple[Chunk, Range]]:
        """The elements ``[start, end)`` of the flattened tensor as chunks, each with its range."""
        dtype = format_name(self.dtype)
        for box in self.boxes:
            size = math.prod(box.sizes)
            shape = self.array_shape if box.array_shape is None else box.array_shape
            # The part of the range in this box, from its first element on; none where low >= high.
            low = max(start - box.first, 0)
            high = min(end - box.first, size)
            for offsets, sizes, begin in rectangles(box.sizes, low, high):
                # ``offsets`` count from the corner of the box, ``at`` from that of the array.
                pairs = zip(box.offsets, offsets, strict=True)
                at = tuple(corner + offset for corner, offset in pairs)
                first = box.first + begin
                chunk = Chunk(self.key + box.suffix, shape, dtype, at, sizes)
                yield chunk, (first, first + math.prod(sizes))

    def whole_rows(self, start: int, count: int) -> int:
        """How many elements from ``start`` on, at most ``count``, end where a row of the last axis
        ends; ``count`` where none does. A range that ends there is fewer rectangles."""
        for box in self.boxes:
            if box.first < start + count <= box.first + math.prod(box.sizes):
                row = box.sizes[-1] if box.sizes else 1
                # Elements after the last end of a row: they are left for the next range.
                left = (start + count - box.first) % row
                return count - left if left < count else count
        return count


def rectangles(sizes: Sequence[int], start: int, end: int) -> list[_Rectangle]:
    """The elements ``[start, end)`` of a flattened array as rectangles, in order: at most two a
    dimension, less one.

    Example: elements 2 to 10 of a 3 x 4 array are the end of row 0, row 1 and the begin of row 2:
    ``[((0, 2), (1, 2), 2), ((1, 0), (1, 4), 4), ((2, 0), (1, 2), 8)]``.
    """
    if start >= end:
        return []
    if not sizes:
        return [((), (), 0)]
    inner = tuple(sizes[1:])
    row = math.prod(inner)
    # Whole rows are ``[first, last)``; before them lies the end of a row, after them the begin of
    # one. Either may be empty.
    first = -(-start // row)
    last = end // row
    if first > last:  # within one row
        return _in_row(sizes, last, start, end)
    before: list[_Rectangle] = []
    if start < first * row:
        before = _in_row(sizes, first - 1, start, first * row)
    whole: list[_Rectangle] = []
    if first < last:
        zeros = (0,) * len(inner)
        whole = [((first, *zeros), (last - first, *inner), first * row)]
    return before + whole + _in_row(sizes, last, last * row, end)


def _in_row(sizes: Sequence[int], index: int, start: int, end: int) -> list[_Rectangle]:
    """``rectangles`` where all elements are in row ``index`` of the first dimension."""
    begin = index * math.prod(sizes[1:])
    inner = rectangles(sizes[1:], start - begin, end - begin)
    return [((index, *offsets), (1, *shape), begin + first) for offsets, shape, first in inner]


def even_ranges(lengths: Sequence[int], count: int) -> list[dict[int, Range]]:
    """Even shares of several tensors: for each tensor, the range that each of ``count`` ranks
    takes; ranks that take nothing of it are left out. Lengths in elements.

    The tensors are thought of as one long row, cut into equal parts: most tensors go to one rank
    whole, and parts differ by one element at most.

    Example: tensors of 3 and 5 elements between two ranks, four elements each, are ``[{0: (0, 3)},
    {0: (0, 1), 1: (1, 5)}]``.
    """
    total = sum(lengths)
    found: list[dict[int, Range]] = []
    rank = 0
    begin = 0
    for length in lengths:
        end = begin + length
        ranges: dict[int, Range] = {}
        while rank < count:
            # A rank has [rank, rank + 1) * total // count of the long row.
            low = max(rank * total // count, begin)
            cut = (rank + 1) * total // count
            high = min(cut, end)
            if low < high:
                ranges[rank] = (low - begin, high - begin)
            if cut > end:
                break  # the rank continues with the next tensor
            rank += 1
        found.append(ranges)
        begin = end
    return found
