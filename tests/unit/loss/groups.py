"""Builders and comparison shared by the tests of the loss module."""

import torch
from torch import Tensor

from megatron_rl.loss import Evidence, ResponseBatch
from megatron_rl.loss.segments import Segments, segments_of


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(*groups: list[float]) -> tuple[Tensor, Segments]:
    """Values of the groups one after another, and their segments."""
    ids = [which for which, group in enumerate(groups) for _ in group]
    return vector(*[value for group in groups for value in group]), segments_of(torch.tensor(ids))


def evidence(
    rewards: Tensor, groups: Segments, *, eps: float = 0.0, ddof: int = 0, **fields: Tensor | None
) -> Evidence:
    """For an estimator that takes all of it: no response is correct, and each has one token."""
    wrong = torch.zeros(rewards.shape, dtype=torch.bool)
    batch = ResponseBatch(rewards, wrong, groups.index, torch.ones_like(groups.index), **fields)
    none_correct = torch.zeros(groups.num, dtype=rewards.dtype)
    omega = rewards.mean().clamp(0, 1)
    return Evidence(batch, rewards, rewards, groups, none_correct, omega, eps, ddof)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def same(found: Tensor, *expected: float, tolerance: float = 2e-6) -> None:
    """Every element within the tolerance; shapes equal."""
    wanted = vector(*expected)
    assert found.shape == wanted.shape, (found, wanted)
    gap = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    assert gap <= tolerance, (
        f"largest difference {gap}: found {found.tolist()}, expected {wanted.tolist()}"
    )
