"""How far the policy has moved from the old one on each response of a minibatch."""

from __future__ import annotations

import torch

from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class LogRatioSums(Signal):
    """``log_ratio_sums``: logprobs minus old_logprobs summed over each response of the minibatch,
    without gradient, by a pass of its own before the update."""

    about = "a pass over every minibatch before it"
    columns = ("log_ratio_sums",)

    def before_minibatch(self, view: StepView) -> Columns:
        if view.experience.on_policy:
            # Before the only update of a step the policy is still the old one.
            return {"log_ratio_sums": torch.zeros(view.num_responses, dtype=torch.float64)}
        moved = view.score().logprobs.numpy() - view.tokens["old_logprobs"]
        moved[~view.loss_mask.numpy()] = 0
        return {"log_ratio_sums": view.response_sums(moved)}
