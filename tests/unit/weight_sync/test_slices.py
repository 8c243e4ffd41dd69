"""Cutting, subtracting and counting slices, against tensors and masks."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.weight_sync.planner.slices import Slice, covered, cut, subtract


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(0, 130),
)
def test_cut_keeps_row_major_order(dims: list[tuple[int, int]], count: int) -> None:
    start, shape = tuple(a for a, _ in dims), tuple(n for _, n in dims)
    numbers = torch.arange(10 ** len(dims)).view((10,) * len(dims))

    def take(start: tuple, size: tuple) -> torch.Tensor:
        return numbers[tuple(slice(a, a + n) for a, n in zip(start, size))].flatten()

    head, tail = cut(Slice(start, shape), count)
    assert torch.equal(torch.cat([take(*region) for region in head + tail]), take(start, shape))
    assert sum(math.prod(n) for _, n in head) == min(count, math.prod(shape))


@given(
    st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 4)] * 2), min_size=2, max_size=5)
)
def test_subtract_and_covered_agree_with_masks(regions: list[tuple[int, ...]]) -> None:
    numbered = [Slice((a, b), (m, n)) for a, b, m, n in regions]
    masks = [torch.zeros(10, 10, dtype=torch.bool) for _ in numbered]
    for mask, (s, n) in zip(masks, numbered):
        mask[s[0] : s[0] + n[0], s[1] : s[1] + n[1]] = True
    union = torch.stack(masks[1:]).any(0)
    assert covered(numbered[1:]) == union.sum()
    assert covered(numbered[1:], numbered[:1]) == (union & masks[0]).sum()
    rest = torch.zeros(10, 10, dtype=torch.int)
    for s, n in subtract(numbered[0], numbered[1]):
        rest[s[0] : s[0] + n[0], s[1] : s[1] + n[1]] += 1
    assert torch.equal(rest, (masks[0] & ~masks[1]).int())
