"""Slices of tensors along all axes: intersected, subtracted, cut, and counted without loss."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """The elements with ``start[d] <= index[d] < start[d] + shape[d]`` on every axis d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def slice_text(region: Slice) -> str:
    """The slice as text. Example: ``Slice((2, 0), (3, 4))`` is ``[2:5, 0:4]``."""
    axes = zip(region.start, region.shape, strict=True)
    return "[" + ", ".join(f"{first}:{first + size}" for first, size in axes) + "]"


def intersect(a: Slice, b: Slice) -> Slice | None:
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
    return Slice(tuple(start), tuple(shape))


def subtract(a: Slice, b: Slice) -> list[Slice]:
    """Disjoint slices that cover ``a`` without ``b``: at most two an axis.

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
                rest.append(Slice(corner, sides))
        start[axis] = first
        shape[axis] = size
    return rest


def without(region: Slice, others: Sequence[Slice]) -> list[Slice]:
    """Disjoint slices that cover ``region`` without any of ``others``."""
    rest = [region]
    for other in others:
        rest = each_without(rest, other)
    return rest


def each_without(regions: Iterable[Slice], other: Slice) -> list[Slice]:
    """The parts of the slices that lie outside of ``other``."""
    return [part for region in regions for part in subtract(region, other)]


def each_inside(regions: Iterable[Slice], other: Slice) -> list[Slice]:
    """The parts of the slices that lie inside of ``other``."""
    inside = (intersect(region, other) for region in regions)
    return [part for part in inside if part is not None]


def cut(region: Slice, count: int) -> tuple[list[Slice], list[Slice]]:
    """``(head, tail)``: slices of the first ``count`` elements in row-major order, and of the
    others, in that order.

    Example: six elements of ``[0:3, 0:4]`` are ``[0:1, 0:4]`` and ``[1:2, 0:2]``, the others are
    ``[1:2, 2:4]`` and ``[2:3, 0:4]``.
    """
    if count <= 0:
        return [], [region]
    if count >= math.prod(region.shape):
        return [region], []
    start, shape = region
    whole_rows, rest = divmod(count, math.prod(shape[1:]))
    head = []
    tail = []
    if whole_rows:
        head.append(Slice(start, (whole_rows, *shape[1:])))
    if rest:  # the cut goes through a row: the row itself is cut, one dimension lower
        row = start[0] + whole_rows
        row_head, row_tail = cut(Slice(start[1:], shape[1:]), rest)
        head += [Slice((row, *part.start), (1, *part.shape)) for part in row_head]
        tail += [Slice((row, *part.start), (1, *part.shape)) for part in row_tail]
        whole_rows += 1
    if whole_rows < shape[0]:
        tail.append(Slice((start[0] + whole_rows, *start[1:]), (shape[0] - whole_rows, *shape[1:])))
    return head, tail


def covered(regions: Sequence[Slice], within: Sequence[Slice] | None = None) -> int:
    """Number of elements in the union of ``regions``; with ``within``, of those that also lie in
    the union of ``within``."""
    if within is not None:
        return covered(regions) + covered(within) - covered([*regions, *within])
    parts = (each for i, region in enumerate(regions) for each in without(region, regions[:i]))
    return sum(math.prod(part.shape) for part in parts)


def common_parts(wanted: Sequence[Sequence[Slice]]) -> list[tuple[Slice, tuple[int, ...]]]:
    """Disjoint slices, each with the numbers of those who want it, that make up what everybody
    wants; the slices of one are disjoint.

    Example: of ``[0:4]`` and ``[2:6]``, ``[2:4]`` is wanted by both, the rest by one.
    """
    parts: list[tuple[Slice, tuple[int, ...]]] = []
    for number, regions in enumerate(wanted):
        for region in regions:
            # Each part so far is split into what this one wants too and what it does not; what no
            # part covers becomes a part of its own.
            rest = [region]
            refined = []
            for part, receivers in parts:
                shared = each_inside(rest, part)
                refined += [(both, (*receivers, number)) for both in shared]
                refined += [(left, receivers) for left in without(part, shared)]
                rest = each_without(rest, part)
            parts = refined + [(left, (number,)) for left in rest]
    return parts


def split(region: Slice, parts: int) -> list[Slice]:
    """The slice cut along its longest axis into ``parts`` of nearly equal size; into fewer
    where that axis is shorter."""
    if not region.shape:
        return [region]
    axis = max(range(len(region.shape)), key=lambda axis: region.shape[axis])
    parts = min(parts, region.shape[axis])
    ends = [region.shape[axis] * i // parts for i in range(parts + 1)]
    pieces = []
    for low, high in zip(ends, ends[1:]):
        start = (*region.start[:axis], region.start[axis] + low, *region.start[axis + 1 :])
        shape = (*region.shape[:axis], high - low, *region.shape[axis + 1 :])
        pieces.append(Slice(start, shape))
    return pieces
