"""Which stored rectangles of an array have elements of a needed one.

torch sorts rectangles along one axis. Those of an array that stacks layers and experts nearly all
overlap there, so that every needed one is compared with all that any rank has stored. Here they are
sorted by the numbers of their first and last element in the flattened array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class Overlap:
    """What stored rectangle ``number`` has of the needed one: both corners count from that of the
    array."""

    number: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredRectangles:
    """Index of the rectangles in which an array of this shape is stored.

    Example: of a 4 x 6 array that is stored as rows 0-1 and rows 2-3, rows 1-2 of columns 3-5 are
    ``Overlap(0, (1, 3), (1, 3))`` and ``Overlap(1, (2, 3), (1, 3))``.
    """

    def __init__(
        self,
        shape: Sequence[int],
        offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        table = (len(offsets), len(shape))
        self._begin = np.array(offsets, dtype=np.int64).reshape(table)
        self._end = self._begin + np.array(sizes, dtype=np.int64).reshape(table)
        lengths = np.array(shape, dtype=np.int64)
        # Of each axis the product of the lengths after it; the cut is for a scalar, without axes.
        self._strides = np.cumprod(np.append(lengths[1:], 1)[::-1])[::-1][: len(shape)]
        first = self._begin @ self._strides
        last = (self._end - 1) @ self._strides
        self._order = np.argsort(first, kind="stable")
        self._first = first[self._order]
        # Where a rectangle ends before the needed one begins, but one sorted before it does not,
        # both are compared.
        self._furthest = np.maximum.accumulate(last[self._order])

    def candidates(self, offsets: Sequence[int], sizes: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Numbers of the rectangles that have to be compared with a needed one."""
        corner = np.array(offsets, dtype=np.int64)
        first = corner @ self._strides
        last = (corner + np.array(sizes, dtype=np.int64) - 1) @ self._strides
        # Neither row ever falls: all before ``low`` end before the needed one begins, and all from
        # ``high`` on begin after its last element.
        low = np.searchsorted(self._furthest, first, side="left")
        high = np.searchsorted(self._first, last, side="right")
        return self._order[low:high]

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Overlap]:
        """All that the stored rectangles have of the needed one."""
        numbers = self.candidates(offsets, sizes)
        corner = np.array(offsets, dtype=np.int64)
        begin = np.maximum(self._begin[numbers], corner)
        end = np.minimum(self._end[numbers], corner + np.array(sizes, dtype=np.int64))
        some = (begin < end).all(axis=1)
        for number, low, high in zip(numbers[some], begin[some], end[some], strict=True):
            yield Overlap(int(number), tuple(low.tolist()), tuple((high - low).tolist()))
