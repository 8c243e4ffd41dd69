"""How many responses to a prompt are correct."""

from __future__ import annotations

from megatron_rl.loss.segments import group_accuracy
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class GroupAccuracy(Signal):
    """``group_accuracy``: the share of correct responses to the response's prompt, over all of the
    rollout step."""

    about = "the accuracy of the prompt in the loss"
    columns = ("group_accuracy",)

    def after_rollout(self, view: StepView) -> Columns:
        experience = view.experience
        return {"group_accuracy": group_accuracy(experience.correct, experience.group_ids)}
