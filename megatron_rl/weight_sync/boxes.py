"""Geometry: hyper-rectangles of named tensors, and the strided views of local parameters where they live."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Box

Rect = tuple[tuple[int, ...], tuple[int, ...]]  # (start, shape), half open
View = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # (parameter, offset, shape, stride), in elements

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Boxes:
    """The same hyper-rectangle of several tensors: box i is ``Box(tensors[i], full, dtype, start, shape, keys[i], offset,
    stride)``. ``keys`` is empty where only the geometry is known (what another process holds).

    Example: ``Boxes(("a.0", "a.1"), (4, 4), "float32", (0, 0), (2, 4), ("p.0", "p.1"), 0, (4, 1))``.
    """

    tensors: tuple[str, ...]
    full: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    keys: tuple[str, ...] = ()
    offset: int = 0
    stride: tuple[int, ...] = ()

    def geometry(self) -> Boxes:
        """Without the places: what other processes need to know."""
        return Boxes(self.tensors, self.full, self.dtype, self.start, self.shape)


def collect(boxes: Iterable[Box]) -> list[Boxes]:
    """Boxes of equal geometry and place, one group each, in order of first appearance."""
    groups: dict[tuple, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for box in boxes:
        tensors, keys = groups[(box.full, box.dtype, box.start, box.shape, box.offset, box.stride)]
        tensors.append(box.tensor)
        keys.append(box.key)
    return [
        Boxes(tuple(tensors), full, dtype, start, shape, tuple(keys), offset, stride)
        for (full, dtype, start, shape, offset, stride), (tensors, keys) in groups.items()
    ]


def expand(groups: Iterable[Boxes]) -> list[Box]:
    """The single boxes of groups that know their places."""
    return [
        Box(name, group.full, group.dtype, group.start, group.shape, key, group.offset, group.stride)
        for group in groups
        for name, key in zip(group.tensors, group.keys, strict=True)
    ]


def natural(name: str) -> tuple[str | int, ...]:
    """Sort key in which ``layers.2`` comes before ``layers.10``."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name)))


def slices(rect: Rect) -> str:
    """``((2, 0), (3, 4))`` as ``[2:5, 0:4]``."""
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*rect, strict=True)) + "]"


def intersect(a: Rect, b: Rect) -> Rect | None:
    """The common part, or None when it is empty."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    shape = tuple(min(x + m, y + n) - s for x, m, y, n, s in zip(*a, *b, start, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def subtract(a: Rect, b: Rect) -> list[Rect]:
    """Disjoint rectangles that cover ``a`` without ``b``."""
    common = intersect(a, b)
    if common is None:
        return [a]
    rest, start, shape = [], list(a[0]), list(a[1])
    for dim, (begin, size) in enumerate(zip(*common, strict=True)):
        for low, high in ((start[dim], begin), (begin + size, start[dim] + shape[dim])):
            if low < high:
                rest.append(((*start[:dim], low, *start[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :])))
        start[dim], shape[dim] = begin, size
    return rest


def cut(rect: Rect, count: int) -> tuple[list[Rect], list[Rect]]:
    """``(head, tail)``: rectangles of the first ``count`` elements in row-major order, and of the others, in that order."""
    start, shape = rect
    if count <= 0:
        return [], [rect]
    if count >= math.prod(shape):
        return [rect], []
    whole, rest = divmod(count, math.prod(shape[1:]))
    head: list[Rect] = [(start, (whole, *shape[1:]))] if whole else []
    tail: list[Rect] = []
    if rest:
        first, last = cut((start[1:], shape[1:]), rest)
        row = start[0] + whole
        head += [((row, *s), (1, *n)) for s, n in first]
        tail += [((row, *s), (1, *n)) for s, n in last]
        whole += 1
    if whole < shape[0]:
        tail.append(((start[0] + whole, *start[1:]), (shape[0] - whole, *shape[1:])))
    return head, tail


def covered(rects: Sequence[Rect], within: Sequence[Rect] | None = None) -> int:
    """Number of elements in the union of ``rects``; with ``within``, of those that also lie in the union of ``within``."""
    if not rects or (within is not None and not within):
        return 0
    everything = [*rects, *(within or ())]
    if not everything[0][0]:
        return 1
    edges = [np.unique([edge for s, n in everything for edge in (s[d], s[d] + n[d])]) for d in range(len(everything[0][0]))]
    masks = []
    for group in (rects, within):
        mask = np.zeros([len(e) - 1 for e in edges], dtype=bool)
        for s, n in group or ():
            mask[tuple(slice(*np.searchsorted(e, (a, a + m))) for e, a, m in zip(edges, s, n, strict=True))] = True
        masks.append(mask)
    volume = masks[0] if within is None else masks[0] & masks[1]
    for dim, edge in enumerate(edges):
        volume = volume * np.diff(edge).reshape([-1 if d == dim else 1 for d in range(len(edges))])
    return int(volume.sum())


def subview(box: Boxes, index: int, rect: Rect) -> View:
    """Where ``rect``, a part of the box, lives in the parameter ``box.keys[index]``."""
    offset = box.offset + sum((a - b) * s for a, b, s in zip(rect[0], box.start, box.stride, strict=True))
    return box.keys[index], offset, rect[1], box.stride


def runs(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[np.ndarray, int]:
    """``(starts, length)``: the runs of consecutive elements that make up a strided view."""
    dims = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([offset], dtype=np.int64)
    for step, size in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return starts, length


def check_written_once(rank: int, wanted: Sequence[Boxes]) -> None:
    """Raises ValueError when two boxes of one process land on the same element of a local parameter."""
    columns: dict[tuple[str, ...], list[tuple[Boxes, int]]] = defaultdict(list)
    for box in wanted:
        if box.keys:
            columns[box.keys].append((box, 0))
    if sum(map(len, columns)) != len({key for keys in columns for key in keys}):  # groups share some of their parameters
        singles: dict[tuple[str, ...], list[tuple[Boxes, int]]] = defaultdict(list)
        for keys, group in columns.items():
            for i, key in enumerate(keys):
                singles[(key,)] += [(box, i) for box, _ in group]
        columns = singles
    for keys, group in columns.items():
        parts = [runs(box.offset, box.shape, box.stride) for box, _ in group]
        starts = np.concatenate([s for s, _ in parts])
        ends = np.concatenate([s + n for s, n in parts])
        owner = np.repeat(np.arange(len(parts)), [len(s) for s, _ in parts])
        order = np.argsort(starts, kind="stable")
        clash = np.flatnonzero(starts[order][1:] < ends[order][:-1])
        if len(clash):
            (a, i), (b, j) = (group[owner[order[clash[0] + k]]] for k in (0, 1))
            raise ValueError(
                f"rank {rank}: element {starts[order][clash[0] + 1]} of parameter {keys[0]!r} would be written twice, by "
                f"{a.tensors[i]}{slices((a.start, a.shape))} and by {b.tensors[j]}{slices((b.start, b.shape))}; "
                "give every box a place of its own"
            )
