"""Which responses came with their prompt and were not sampled."""

from __future__ import annotations

import torch

from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class IsDemonstration(Signal):
    """``is_demonstration``: the response came with its prompt; what is sampled beside them, and
    how, is the rollout's (``rollouts/demonstrations.py``)."""

    about = "responses that prompts carry, in `extra.given_responses`"
    columns = ("is_demonstration",)

    def after_rollout(self, view: StepView) -> Columns:
        return {"is_demonstration": torch.from_numpy(view.experience.responses.is_demonstration)}
