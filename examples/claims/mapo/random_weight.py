"""MAPO's mixture with a weight drawn at random for each group: the ablation of its paper."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.loss import EstimatorNeeds, Evidence, register_estimator
from megatron_rl.loss.per_response.advantages import apd, zscore


@register_estimator("mixed_at_random", needs=EstimatorNeeds(min_group=2, unit_rewards=True))
def mixed_at_random(evidence: Evidence) -> Tensor:
    """(1 - l) zscore + l apd, l uniform in [0, 1) for each group; drawn alike on every rank, from
    the number of tokens of the step."""
    drawn = torch.Generator().manual_seed(int(evidence.lengths.sum()))
    groups = evidence.groups
    shares = torch.rand(len(groups.mean(evidence.rewards)), generator=drawn, dtype=torch.float64)
    weight = groups.broadcast(shares.to(evidence.rewards))
    by_std = zscore(evidence.rewards, groups, eps=evidence.eps, ddof=evidence.ddof)
    return (1 - weight) * by_std + weight * apd(evidence.rewards, groups, evidence.eps)
