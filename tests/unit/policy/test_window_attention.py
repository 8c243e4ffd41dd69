"""Attention within windows is that of each window alone, in a few calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

from megatron_rl.models.vision import window_attention
from megatron_rl.models.vision.window_attention import Windows

SCALE = 0.3


def plainly(query: Tensor, key: Tensor, value: Tensor, boundaries: list[int]) -> Tensor:
    """Every patch beside those of its window."""
    scores = torch.einsum("qhw,khw->hqk", query, key) * SCALE
    window = torch.bucketize(torch.arange(len(query)), torch.tensor(boundaries), right=True)
    scores = scores.masked_fill(window[:, None] != window, -torch.inf)
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)


@pytest.mark.parametrize("boundaries", [[0, 3, 6, 8, 8, 11, 12], [0, 12], [0, 4, 8, 12]])
def test_it_equals_attention_under_a_mask(boundaries: list[int]) -> None:
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(12, 2, 5, generator=draw, dtype=torch.float64) for _ in range(4)]
    *heads, slope = given
    for each in heads:
        each.requires_grad_()
    windows = Windows.of(torch.tensor(boundaries), lambda values: values)
    found = windows.attend(*heads, SCALE)
    wanted = plainly(*heads, boundaries)
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(each, heads, slope) for each in (found, wanted))
    torch.testing.assert_close(*gradients)
    assert windows.boundaries.tolist() == boundaries
    assert windows.longest == max(b - a for a, b in zip(boundaries, boundaries[1:], strict=False))


def test_the_ragged_kernel_is_given_whole_patches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's varlen_attn, which needs a GPU, would get: its shapes and its boundaries."""
    calls: list[tuple[Any, ...]] = []

    def varlen(query: Tensor, *rest: Any, scale: float) -> Tensor:
        calls.append((query.shape, *rest[2:], scale))
        return query

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    heads = torch.zeros(12, 2, 5, dtype=torch.bfloat16).as_subclass(OnGpu)
    windows = Windows.of(torch.tensor([0, 3, 12]), lambda values: values)
    windows.attend(heads, heads, heads, SCALE)
    ends = windows.boundaries
    assert calls == [((12, 2, 5), ends, ends, 9, 9, SCALE)] and ends.dtype == torch.int32


def test_calls_of_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,225 tokens, 70 x 70 patches: 81 windows of 8 x 8 patches and what is left at two edges, in
    28 of 32 blocks. Window by window those are 2,272 calls."""
    calls: list[int] = []

    def counted(query: Tensor, *rest: Any, **named: Any) -> Tensor:
        calls.append(query.shape[0])
        return query

    monkeypatch.setattr(window_attention.F, "scaled_dot_product_attention", counted)
    grids = torch.tensor([[1, 70, 70]])
    _, inner = get_vision_window_index(grids, 2, 112, 14)
    heads = torch.zeros(4900, 1, 1)
    found = []
    for boundaries, blocks in ((inner, 28), (get_vision_cu_seqlens(grids), 4)):
        calls.clear()
        Windows.of(boundaries, lambda values: values).attend(heads, heads, heads, SCALE)
        found.append((len(calls) * blocks, sum(calls) * blocks))
    assert found == [(3 * 28, 81 * 28), (4, 4)]
    assert sum(by_window for _, by_window in found) == 2272
