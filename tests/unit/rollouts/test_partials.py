"""Sums of single responses: right, and the same wherever a response lies."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.rollouts.rows.partials import (
    mismatch_of_partials,
    mismatch_partials,
    of_all_rows,
    response_maxima,
    response_sums,
    token_mean,
)


class Ranks:
    """A world whose other ranks hold what they are given."""

    rank = 0

    def __init__(self, others) -> None:
        self.others = others

    def all_gather(self, value) -> list:
        return [value, *self.others]


def drawn(seed: int = 0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 3000, 40)
    old = -draw.exponential(0.3, lengths.sum()).astype(np.float32)
    sampler = old + draw.normal(0, 0.05, len(old)).astype(np.float32)
    return lengths, old, sampler


def test_sums_and_maxima_by_hand():
    values = np.array([1.0, 2.0, 4.0, -8.0], dtype=np.float32)
    lengths = np.array([0, 2, 0, 1, 1, 0])
    assert response_sums(values, lengths).tolist() == [0, 3, 0, 4, -8, 0]
    assert response_maxima(values, lengths).tolist() == [0, 2, 0, 4, -8, 0]
    assert response_sums(values[:0], lengths[:0]).tolist() == []
    assert response_sums(values[:0], np.array([0, 0])).tolist() == [0, 0]


def test_a_response_has_the_same_partials_wherever_it_lies():
    lengths, old, sampler = drawn()
    ends = lengths.cumsum()
    whole = mismatch_partials(old, sampler, lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        alone = slice(end - length, end)
        single = mismatch_partials(old[alone], sampler[alone], lengths[row : row + 1])
        assert np.array_equal(single[0], whole[row])


def mismatch_metrics(old: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    """Over all tokens at once."""
    difference = (old - sampler).double()
    return {
        "mismatch/logprob_abs_diff_mean": difference.abs().mean().item(),
        "mismatch/logprob_abs_diff_max": difference.abs().max().item(),
        "mismatch/ratio_mean": difference.exp().mean().item(),
        "mismatch/kl_k3": (difference.exp() - difference - 1).mean().item(),
    }


def test_metrics_are_those_of_all_tokens_at_once():
    lengths, old, sampler = drawn()
    table = mismatch_partials(old, sampler, lengths)
    expected = mismatch_metrics(torch.from_numpy(old), torch.from_numpy(sampler))
    metrics = mismatch_of_partials(table, int(lengths.sum()))
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert mismatch_of_partials(table[:0], 0) == {}
    exact = math.fsum(np.abs((old - sampler).astype(np.float64))) / lengths.sum()
    assert token_mean(table[:, 0], lengths) == pytest.approx(exact, rel=1e-14)
    assert token_mean(table[:0, 0], []) == 0


class Held(list):
    """Responses as far as they are asked here; a list for its length."""

    def __init__(self, rows: list[int], holders: list[int]) -> None:
        super().__init__(holders)
        self.tokens = SimpleNamespace(rows=np.array(rows))
        self.holders = np.array(holders)


def test_the_table_is_in_canonical_order():
    table = np.arange(8.0).reshape(4, 2)
    world = Ranks([(np.array([0, 2]), table[[0, 2]])])
    found = of_all_rows(Held([3, 1], holders=[1, 0, 1, 0]), table[[3, 1]], world)
    assert found.tolist() == table.tolist()
    # Row 2 lies here as well, and its holder tells.
    both = Held([3, 1, 2], holders=[1, 0, 1, 0])
    assert of_all_rows(both, table[[3, 1, 2]], world).tolist() == table.tolist()
    with pytest.raises(AssertionError, match="held by one rank"):
        of_all_rows(Held([3, 2], holders=[1, 1, 0, 0]), table[[3, 2]], world)
