"""How far the run is."""

from __future__ import annotations

import torch

from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class RunProgress(Signal):
    """``progress``: the share of the run's steps that there are up to this one, in [0, 1]."""

    about = "how far the run is"
    columns = ("progress",)

    def after_rollout(self, view: StepView) -> Columns:
        return {"progress": torch.tensor(view.experience.progress, dtype=torch.float64)}
