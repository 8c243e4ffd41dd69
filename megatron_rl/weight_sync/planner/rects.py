"""Hyper-rectangles of tensors: intersected, subtracted, cut, and counted without loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Rect(NamedTuple):
    """The elements with ``start[d] <= index[d] < start[d] + shape[d]`` on every axis d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def slices(rect: Rect) -> str:
    """The rectangle as text. Example: ``Rect((2, 0), (3, 4))`` is ``[2:5, 0:4]``."""
    axes = zip(rect.start, rect.shape, strict=True)
    return "[" + ", ".join(f"{first}:{first + size}" for first, size in axes) + "]"


def intersect(a: Rect, b: Rect) -> Rect | None:
    """The elements in both, or None when there are none."""
    start = []
    shape = []
    for a_first, a_size, b_first, b_size in zip(a.start, a.shape, b.start, b.shape, strict=True):
        first = max(a_first, b_first)
        size = min(a_first + a_size, b_first + b_size) - first
        if size <= 0:
            return None
        start.append(first)
        shape.append(size)
    return Rect(tuple(start), tuple(shape))


def subtract(a: Rect, b: Rect) -> list[Rect]:
    """Disjoint rectangles that cover ``a`` without ``b``: at most two an axis.

    Example: of ``a = [0:4, 0:4]`` and ``b = [1:3, 1:3]`` the elements of the first to fourth::

        1 1 1 1
        3 b b 4
        3 b b 4
        2 2 2 2
    """
    common = intersect(a, b)
    if common is None:
        return [a]
    rest = []
    # Axis after axis, what lies before and behind the common part is split off; what remains is as
    # narrow as the common part on that axis.
    start = list(a.start)
    shape = list(a.shape)
    for axis, (first, size) in enumerate(zip(common.start, common.shape, strict=True)):
        end = start[axis] + shape[axis]
        for low, high in ((start[axis], first), (first + size, end)):
            if low < high:
                corner = (*start[:axis], low, *start[axis + 1 :])
                sides = (*shape[:axis], high - low, *shape[axis + 1 :])
                rest.append(Rect(corner, sides))
        start[axis] = first
        shape[axis] = size
    return rest


def without(rect: Rect, others: Sequence[Rect]) -> list[Rect]:
    """Disjoint rectangles that cover ``rect`` without any of ``others``."""
    rest = [rect]
    for other in others:
        rest = each_without(rest, other)
    return rest


def each_without(rects: Iterable[Rect], other: Rect) -> list[Rect]:
    """The parts of the rectangles that lie outside of ``other``."""
    rest = []
    for rect in rects:
        rest += subtract(rect, other)
    return rest


def each_inside(rects: Iterable[Rect], other: Rect) -> list[Rect]:
    """The parts of the rectangles that lie inside of ``other``."""
    inside = []
    for rect in rects:
        common = intersect(rect, other)
        if common is not None:
            inside.append(common)
    return inside


def cut(rect: Rect, count: int) -> tuple[list[Rect], list[Rect]]:
    """``(head, tail)``: rectangles of the first ``count`` elements in row-major order, and of the
    others, in that order.

    Example: six elements of ``[0:3, 0:4]`` are ``[0:1, 0:4]`` and ``[1:2, 0:2]``, the others are
    ``[1:2, 2:4]`` and ``[2:3, 0:4]``.
    """
    if count <= 0:
        return [], [rect]
    if count >= math.prod(rect.shape):
        return [rect], []
    start, shape = rect
    whole_rows, rest = divmod(count, math.prod(shape[1:]))
    head = []
    tail = []
    if whole_rows:
        head.append(Rect(start, (whole_rows, *shape[1:])))
    if rest:  # the cut goes through a row: the row itself is cut, one dimension lower
        row = start[0] + whole_rows
        row_head, row_tail = cut(Rect(start[1:], shape[1:]), rest)
        head += [Rect((row, *part.start), (1, *part.shape)) for part in row_head]
        tail += [Rect((row, *part.start), (1, *part.shape)) for part in row_tail]
        whole_rows += 1
    if whole_rows < shape[0]:
        tail.append(Rect((start[0] + whole_rows, *start[1:]), (shape[0] - whole_rows, *shape[1:])))
    return head, tail


def covered(rects: Sequence[Rect], within: Sequence[Rect] | None = None) -> int:
    """Number of elements in the union of ``rects``; with ``within``, of those that also lie in the
    union of ``within``."""
    if not rects or (within is not None and not within):
        return 0
    every_rect = [*rects, *(within or ())]
    num_axes = len(rects[0].start)
    if num_axes == 0:
        return 1  # a scalar
    # The edges of all rectangles divide space into cells, each of which is wholly in or out of
    # every rectangle: a mask of cells is enough, however large the tensor.
    edges = []
    for axis in range(num_axes):
        lows = [rect.start[axis] for rect in every_rect]
        highs = [rect.start[axis] + rect.shape[axis] for rect in every_rect]
        edges.append(np.unique(lows + highs))
    inside = _cells(rects, edges)
    if within is not None:
        inside = inside & _cells(within, edges)
    volume = inside.astype(np.int64)
    for axis, edge in enumerate(edges):
        along_axis = [1] * num_axes
        along_axis[axis] = -1
        volume = volume * np.diff(edge).reshape(along_axis)
    return int(volume.sum())


def _cells(rects: Sequence[Rect], edges: Sequence[np.ndarray]) -> np.ndarray:
    """Which cells between the edges lie in any of the rectangles."""
    mask = np.zeros([len(edge) - 1 for edge in edges], dtype=bool)
    for rect in rects:
        window = []
        for edge, first, size in zip(edges, rect.start, rect.shape, strict=True):
            # The rectangle's own sides are among the edges: cells begin and end there.
            low, high = np.searchsorted(edge, (first, first + size))
            window.append(slice(low, high))
        mask[tuple(window)] = True
    return mask


def common_parts(wanted: Sequence[Sequence[Rect]]) -> list[tuple[Rect, tuple[int, ...]]]:
    """Disjoint rectangles, each with the numbers of those who want it, that make up what everybody
    wants; the rectangles of one are disjoint.

    Example: of ``[0:4]`` and ``[2:6]``, ``[2:4]`` is wanted by both, the rest by one.
    """
    parts: list[tuple[Rect, tuple[int, ...]]] = []
    for number, rects in enumerate(wanted):
        for rect in rects:
            # Each part so far is split into what this one wants too and what it does not; what no
            # part covers becomes a part of its own.
            rest = [rect]
            refined = []
            for part, takers in parts:
                shared = each_inside(rest, part)
                refined += [(both, (*takers, number)) for both in shared]
                refined += [(left, takers) for left in without(part, shared)]
                rest = each_without(rest, part)
            parts = refined + [(left, (number,)) for left in rest]
    return parts


def split(rect: Rect, parts: int) -> list[Rect]:
    """The rectangle cut along its longest axis into ``parts`` of nearly equal size; into fewer
    where that axis is shorter."""
    if not rect.shape:
        return [rect]
    axis = max(range(len(rect.shape)), key=lambda axis: rect.shape[axis])
    parts = min(parts, rect.shape[axis])
    ends = [rect.shape[axis] * i // parts for i in range(parts + 1)]
    pieces = []
    for low, high in zip(ends, ends[1:]):
        start = (*rect.start[:axis], rect.start[axis] + low, *rect.start[axis + 1 :])
        shape = (*rect.shape[:axis], high - low, *rect.shape[axis + 1 :])
        pieces.append(Rect(start, shape))
    return pieces
