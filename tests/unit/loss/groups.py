"""Builders and comparison shared by the tests of the loss module."""

import torch
from torch import Tensor

from megatron_rl.loss.segments import Segments, segments_of


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(*groups: list[float]) -> tuple[Tensor, Segments]:
    """Values of the groups one after another, and their segments."""
    ids = [which for which, group in enumerate(groups) for _ in group]
    return vector(*[value for group in groups for value in group]), segments_of(torch.tensor(ids))


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def same(found: Tensor, *expected: float, tolerance: float = 2e-6) -> None:
    """Every element within the tolerance; shapes equal."""
    wanted = vector(*expected)
    assert found.shape == wanted.shape, (found, wanted)
    gap = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    assert gap <= tolerance, f"largest difference {gap}: found {found.tolist()}, expected {wanted.tolist()}"
