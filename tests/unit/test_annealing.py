"""A temperature that falls within a response: values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.annealing import Annealing, temperatures

ANNEALING = Annealing(1.2, 0.1, decay_tokens=500.0, plain_tokens=10)


def test_temperatures_by_hand() -> None:
    """exp(0.02) = 1.020201, exp(0.4) = 1.491825, and exp(0.8) = 2.225541 is too much for 0.1. The
    temperature is lowest from t = 500 ln 2.1 = 370.97 on."""
    positions = torch.tensor([0, 9, 10, 200, 370, 371, 400, 10**6])
    expected = [1, 1, 1.179799, 0.708175, 2.2 - math.exp(0.74), 0.1, 0.1, 0.1]
    found = ANNEALING.of_positions(positions)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found[4] > 0.1


def test_without_plain_tokens_the_first_is_sampled_at_the_start() -> None:
    first = Annealing(1.5, 0.1, decay_tokens=3.0, plain_tokens=0).of_positions(torch.arange(2))
    assert first.tolist() == pytest.approx([1.5, 2.5 - math.exp(1 / 3)])


def test_responses_begin_anew() -> None:
    short = Annealing(1.2, 0.1, decay_tokens=2.0, plain_tokens=1)
    one, two = 2.2 - math.exp(0.5), 0.1
    expected = [1, one, 1, 1, one, two]
    assert short.of_lengths(torch.tensor([2, 1, 3])).tolist() == pytest.approx(expected)
    assert short.of_lengths(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_the_fall_is_slower_from_step_to_step() -> None:
    """500, 600, ... and no more than 750 tokens."""
    growing = Annealing(1.2, 0.1, 500.0, 10, decay_growth=100.0, decay_limit=750.0)
    assert [growing.at(step).decay_tokens for step in (1, 2, 3, 4, 99)] == [500, 600, 700, 750, 750]
    assert growing.at(3).at(3) == growing.at(3), "a step is taken once"
    assert ANNEALING.at(50).decay_tokens == 500


def test_each_position_may_have_its_own() -> None:
    columns = torch.tensor([[1.2, 0.1, 500.0, 10.0], [1.0, 1.0, math.inf, 0.0]]).double()
    found = temperatures(torch.tensor([200, 200]), *columns.unbind(1))
    assert found.tolist() == pytest.approx([0.708175, 1], abs=1e-6)
    assert found[1] == 1, "exactly, so that the logits keep their bits"
