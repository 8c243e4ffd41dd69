"""A signal, the mean reward of earlier steps, and who reads it. The page: signal.md."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss import Credit, EstimatorNeeds, register_estimator
from megatron_rl.signals import Columns, Signal, StepView, register_signal


@register_signal
class MovingBaseline(Signal):
    """``baseline``: the mean reward of earlier steps, recent ones weighing more; 0 at the first."""

    columns = ("baseline",)

    def __init__(self, *, momentum: float) -> None:
        self._momentum = momentum
        self._mean = 0.0

    def after_rollout(self, view: StepView) -> Columns:
        return {"baseline": torch.tensor(self._mean)}

    def after_credit(self, view: StepView, credit: Credit) -> None:
        assert credit.rewards is not None
        rise = credit.rewards.mean().item() - self._mean
        self._mean += (1 - self._momentum) * rise

    def state(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._mean = state.get("mean", 0.0)


@register_estimator("above_earlier", needs=EstimatorNeeds(min_group=1))
def above_earlier(rewards: Tensor, baseline: Tensor, *, momentum: float = 0.9) -> Tensor:
    """r - baseline. ``momentum`` is the signal's: it takes its settings from who reads it."""
    return rewards - baseline
