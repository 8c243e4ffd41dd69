"""What the rewards of a prompt were when it was visited before.

A visit is one group of responses. Per prompt: how many visits there were, and the mean and the
variance of their rewards, merged visit by visit. All is computed in float64, so that what a
checkpoint holds is resumed exactly.
"""

import torch
from torch import Tensor

from megatron_rl.loss.choices import estimator
from megatron_rl.loss.per_response.advantages import over
from megatron_rl.loss.segments import Segments
from megatron_rl.loss.shapes import PerGroup, PerResponse, ResponseCounts

ROUNDING = 1e-12  # relative; two float64 means of the same rewards differ by less


@estimator()
def smoothed(
    rewards: PerResponse,
    groups: Segments,
    visits: ResponseCounts,
    history_mean: PerResponse,
    history_var: PerResponse,
    eps: float,
) -> PerResponse:
    """Of S_new and S_all the one of smaller magnitude, at visit i of a prompt:
    S_new = (i-1)/i A_new + 1/i A_all, S_all = 1/i A_new + (i-1)/i A_all.

    A_new = (r - mean) / (std + eps) by mean and sample std of this visit, A_all by those of all
    visits up to this one (``after_visit``); 0 where there is no spread. At the first visit both are
    zscore with the sample std; later a group without spread may have advantages.
    Source: DCPO (arXiv 2509.02333), smooth advantage standardization; its released code.
    """
    _, mean_all, var_all = after_visit(rewards, groups, visits, history_mean, history_var)
    mean_new, var_new = _of_this_visit(rewards, groups)
    new = _standardized(rewards, groups.broadcast(mean_new), groups.broadcast(var_new), eps)
    everything = _standardized(rewards, mean_all, var_all, eps)
    weight = 1 / (visits.double() + 1)
    mostly_new = (1 - weight) * new + weight * everything
    mostly_all = weight * new + (1 - weight) * everything
    smaller = torch.where(mostly_new.abs() < mostly_all.abs(), mostly_new, mostly_all)
    return smaller.to(rewards.dtype)


def after_visit(
    rewards: PerResponse,
    groups: Segments,
    visits: ResponseCounts,
    history_mean: PerResponse,
    history_var: PerResponse,
) -> tuple[ResponseCounts, PerResponse, PerResponse]:
    """(visits, mean, variance) of each response's prompt with this visit in it, in float64.

    mean' = mean + (m - mean) / (n + 1), var' = (n var + s^2 + n/(n + 1) (m - mean)^2) / (n + 1),
    with m and s the mean and sample std of this visit, n the visits before it.
    """
    m, square = (groups.broadcast(each) for each in _of_this_visit(rewards, groups))
    n = visits.double()
    mean = torch.where(visits > 0, history_mean.double(), m)
    moved = m - mean
    # Visits that were all alike have no variance, whatever the rounding of their means.
    moved = moved.masked_fill(moved.abs() <= ROUNDING * mean.abs(), 0)
    merged = (n * history_var.double() + square + n / (n + 1) * moved.square()) / (n + 1)
    return visits + 1, mean + moved / (n + 1), merged


def _of_this_visit(rewards: Tensor, groups: Segments) -> tuple[PerGroup, PerGroup]:
    """Mean and sample variance of each group, 0 exactly where there is no spread."""
    rewards = rewards.double()
    var = groups.std(rewards, ddof=1).square()
    return groups.mean(rewards), torch.where(groups.spread(rewards) > 0, var, torch.zeros_like(var))


def _standardized(rewards: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    spread = torch.where(var > 0, var.sqrt() + eps, torch.zeros_like(var))
    return over(rewards.double() - mean, spread)  # 0 where var is 0
