"""What the learner and the metrics make of annealed sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.annealing import Annealing, policy_temperatures
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.passes import LocalBatch
from megatron_rl.rollouts.rows.metrics import temperature_metrics
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.signals.end_token import EndTokens
from megatron_rl.types import Sampling

ANNEALING = Annealing(1.2, 0.1, decay_tokens=2.0, plain_tokens=1, decay_growth=1.0)
SECOND = 2.2 - math.exp(0.5)  # temperature of the second token in step 1


def test_a_step_samples_by_its_own_schedule() -> None:
    sampling = Sampling(4, 8, annealing=ANNEALING)
    third = SamplingPlan(sampling, seed=2).of_step(3)
    assert third.annealing == replace(ANNEALING, decay_tokens=4.0, decay_growth=0.0)
    assert replace(third, annealing=ANNEALING, seed=None) == sampling
    plain = Sampling(4, 8, temperature=0.7)
    assert replace(SamplingPlan(plain, seed=2).of_step(3), seed=None) == plain


def test_temperatures_of_the_policy() -> None:
    lengths = np.array([2, 1])
    found = policy_temperatures(ANNEALING.at(1), lengths)
    assert found is not None and found.tolist() == pytest.approx([1, SECOND, 1])
    assert policy_temperatures(replace(ANNEALING, in_policy=False), lengths) is None
    assert policy_temperatures(None, lengths) is None


def test_metrics_by_hand() -> None:
    """Temperatures 1, 0.551279 | 1 | 1, 0.551279, 0.1."""
    found = temperature_metrics(ANNEALING.at(1), torch.tensor([2, 1, 3]))
    assert found == {
        "rollout/temperature_mean": pytest.approx((3 + 2 * SECOND + 0.1) / 6),
        "rollout/temperature_min": pytest.approx(0.1),
        "rollout/anneal_decay_tokens": 2.0,
    }
    assert temperature_metrics(None, torch.tensor([2])) == {}


def test_the_token_behind_a_response_has_temperature_1() -> None:
    pairs = [((5,), (6, 7)), ((5,), (8,))]
    batch = replace(sequence_batch(pairs), temperatures=torch.tensor([0.9, 0.8, 0.7]))
    longer = EndTokens.of(LocalBatch(batch, [[0, 1]]), 3).batch.batch
    assert longer.temperatures is not None
    assert longer.temperatures.tolist() == pytest.approx([0.9, 0.8, 1, 0.7, 1])
    assert longer.token_ids.tolist() == [5, 6, 7, 3, 5, 8, 3]
    plain = EndTokens.of(LocalBatch(sequence_batch(pairs), [[0, 1]]), 3)
    assert plain.batch.batch.temperatures is None
