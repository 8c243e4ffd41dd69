"""Rotary angles of every token are applied as megatron applies them, and others are left to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.policy import patches


@pytest.mark.parametrize("angles", [7, 4])
def test_the_same_bits_with_and_without_boundaries(angles: int) -> None:
    """Of seven tokens, or of the positions of the longest sequence."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(7, 2, 6, generator=draw)
    freqs = torch.randn(angles, 1, 1, 4, generator=draw)
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    given = (states, boundaries, freqs, False, False, 1.5, group)
    assert patches._rotary(*given).equal(patches._rotary_by_boundaries(*given))
