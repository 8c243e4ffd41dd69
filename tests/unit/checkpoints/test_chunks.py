"""Rectangles of ranges, and even shares, against counting every element."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from megatron_rl.checkpoints.chunks import ArrayLocation, Box, even_ranges, rectangles


def numbered(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(sizes)).view(sizes)


def cut_out(array: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        array = array.narrow(axis, offset, size)
    return array


def test_the_example_of_the_docstring():
    assert rectangles((3, 4), 2, 10) == [
        ((0, 2), (1, 2), 2),
        ((1, 0), (1, 4), 4),
        ((2, 0), (1, 2), 8),
    ]


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5), (2, 3, 4), (1, 4, 1, 3), (5, 1)])
def test_every_range_is_cut_into_few_rectangles_in_order(sizes):
    array = numbered(sizes)
    for start, end in itertools.combinations(range(array.numel() + 1), 2):
        found = rectangles(sizes, start, end)
        elements = [cut_out(array, at, shape).flatten() for at, shape, _ in found]
        assert torch.cat(elements).tolist() == list(range(start, end)), (start, end)
        assert [first for *_, first in found] == [int(part[0]) for part in elements]
        assert len(found) <= 2 * len(sizes) - 1


def test_an_empty_range_has_no_rectangle_and_a_number_has_one():
    assert rectangles((3, 4), 5, 5) == [] and rectangles((3, 4), 7, 5) == []
    assert rectangles((), 0, 1) == [((), (), 0)] and rectangles((), 0, 0) == []


def test_a_tensor_of_two_boxes_is_cut_where_they_meet():
    """As gate and up matrices lie in one tensor of a rank and apart in the array."""
    boxes = (Box((0, 2, 0), (1, 2, 3), first=0), Box((0, 6, 0), (1, 2, 3), first=6))
    place = ArrayLocation("gated", (2, 8, 3), torch.float32, boxes)
    array = numbered((2, 8, 3))
    local = torch.cat([array[0, 2:4].flatten(), array[0, 6:8].flatten()])
    for start, end in itertools.combinations(range(13), 2):
        found = []
        for chunk, (low, high) in place.chunks(start, end):
            part = cut_out(array, chunk.offsets, chunk.sizes).flatten()
            assert part.tolist() == local[low:high].tolist()
            found += part.tolist()
        assert found == local[start:end].tolist()


def test_a_range_is_cut_where_a_row_ends():
    boxes = (Box((0, 2, 0), (1, 2, 3), first=0), Box((0, 6, 0), (1, 2, 3), first=6))
    place = ArrayLocation("gated", (2, 8, 3), torch.float32, boxes)
    assert [place.whole_rows(4, count) for count in range(1, 9)] == [1, 2, 2, 2, 5, 5, 5, 8]
    assert place.whole_rows(3, 2) == 2, "less than a row fits"
    assert ArrayLocation("number", (), torch.float32, (Box((), ()),)).whole_rows(0, 1) == 1


def test_shares_are_even_and_cover_every_element_once():
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.choice([0, 1, 3, 50]) for _ in range(draw.randrange(1, 6))]
        count = draw.randrange(1, 8)
        shares = even_ranges(lengths, count)
        sizes = [0] * count
        for length, ranges in zip(lengths, shares, strict=True):
            assert list(ranges) == sorted(ranges) and all(a < b for a, b in ranges.values())
            taken = [element for part in ranges.values() for element in range(*part)]
            assert taken == list(range(length)), (lengths, count)
            for rank, (start, end) in ranges.items():
                sizes[rank] += end - start
        assert max(sizes) - min(sizes) <= 1, (lengths, count)
        cut = sum(map(len, shares))
        assert cut <= len(lengths) + count - 1, "most tensors are in one piece"


def test_ranges_of_many_tensors_for_many_ranks_are_as_many_as_both():
    """Not their product, which every rank of a large launch would have in memory."""
    shares = even_ranges([4096] * 5000, 1024)
    assert sum(map(len, shares)) <= 5000 + 1024
