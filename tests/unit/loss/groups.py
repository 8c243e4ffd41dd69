"""Builders and comparison shared by the tests of the loss module."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss import Evidence, ResponseBatch, Terms, TokenBatch
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_token.terms import terms_of
from megatron_rl.loss.segments import Segments, segments_of


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(*groups: list[float]) -> tuple[Tensor, Segments]:
    """Values of the groups one after another, and their segments."""
    ids = [which for which, group in enumerate(groups) for _ in group]
    return vector(*[value for group in groups for value in group]), segments_of(torch.tensor(ids))


def plain(**changes: Any) -> MethodConfig:
    """REINFORCE of z-scores without KL, but for ``changes`` of the yaml."""
    values = {
        "name": "plain",
        "estimator": {"name": "zscore"},
        "policy_loss": {"name": "reinforce"},
        "aggregate": {"name": "seq_mean_token_mean"},
        "kl": {"coef": 0.0, "estimator": "k1"},
    }
    return MethodConfig(**values | changes)


def terms(
    loss_mask: Tensor,
    index: Sequence[int],
    counts: Sequence[int],
    sequence_sum: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Terms:
    """For a loss that takes means over responses: which tokens count, the response of each, and
    how many count of each response."""
    zeros, of_responses = vector(*[0] * len(index)), vector(*[0] * len(counts))
    batch = TokenBatch(zeros, zeros, torch.tensor(index), loss_mask, of_responses, of_responses)
    made = terms_of(batch, sequence_sum, None)
    return replace(made, response_loss_tokens=torch.tensor(counts))


def evidence(
    rewards: Tensor, groups: Segments, *, eps: float = 0.0, ddof: int = 0, **columns: Tensor
) -> Evidence:
    """For an estimator that takes all of it: no response is correct, and each has one token."""
    wrong = torch.zeros(rewards.shape, dtype=torch.bool)
    lengths = torch.ones_like(groups.index)
    batch = ResponseBatch(rewards, wrong, groups.index, lengths, columns=columns)
    none_correct = torch.zeros(groups.num, dtype=rewards.dtype)
    omega = rewards.mean().clamp(0, 1)
    return Evidence(batch, rewards, rewards, groups, none_correct, omega, eps, ddof)


def changed(batch: TokenBatch, **values: Tensor | None) -> TokenBatch:
    """With other values of fields or columns; a column that is None is left out."""
    found = {name: value for name, value in values.items() if name in batch.__dataclass_fields__}
    for kind in ("token_columns", "columns"):
        columns = getattr(batch, kind)
        own = {name: values[name] for name in values.keys() & columns.keys()}
        merged = {**columns, **own}
        found[kind] = {name: value for name, value in merged.items() if value is not None}
    return replace(batch, **found)


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
