"""The plug-ins of the claims, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.config.method import load_method
from megatron_rl.loss import ResponseBatch
from megatron_rl.plugins import load_plugins
from tools.claims import CLAIMS

pytestmark = pytest.mark.usefixtures("fresh_registries")


def advantages(estimator: str, rewards: list[float], lengths: list[int], size: int) -> Tensor:
    """Of groups of ``size`` responses; a reward of 1 is correct."""
    values = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.arange(len(rewards)) // size
    batch = ResponseBatch(values, values == 1, groups, torch.tensor(lengths))
    method = load_method("grpo", ["eps=0", "kl.coef=0", f"estimator.name={estimator}"])
    return method.credit(batch).advantages


def test_every_group_has_a_mean_of_its_own():
    """z = 1 and -1; groups of 4 and 12 tokens: the mean of the two means gives a token 1/8 and
    1/24, which token_mean reaches from 1/16 by factors of 2 and 2/3."""
    load_plugins([str(CLAIMS / "means_of_parts" / "part_means.py")])
    found = advantages("zscore_part_means", [1, 0, 1, 0], [1, 3, 2, 10], 2)
    assert found.tolist() == pytest.approx([2, -2, 2 / 3, -2 / 3], abs=1e-15)
    equal = advantages("zscore_part_means", [1, 0, 1, 0], [4, 2, 1, 5], 2)
    assert equal.tolist() == [1, -1, 1, -1]


def test_each_group_has_a_random_share_of_both_advantages():
    """One of four right: z = 0.75 / (sqrt(3)/4) = sqrt(3), and the percent deviation
    0.75 / 0.25 = 3; in any mixture the wrong ones are a third of it, with the other sign."""
    load_plugins([str(CLAIMS / "mapo" / "random_weight.py")])
    found = advantages("mixed_at_random", [1, 0, 0, 0] * 8, [3] * 32, 4).view(8, 4)
    right = found[:, 0]
    assert ((right >= math.sqrt(3)) & (right < 3)).all()
    assert len(set(right.tolist())) == 8
    assert found[:, 1:].tolist() == [[pytest.approx(-value / 3)] * 3 for value in right.tolist()]
    again = advantages("mixed_at_random", [1, 0, 0, 0] * 8, [3] * 32, 4).view(8, 4)
    assert torch.equal(again, found)
