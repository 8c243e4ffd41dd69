"""What is known of a step once it is scored."""

import torch

from megatron_rl.loss.segments import group_accuracy
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class RunProgress(Signal):
    """``progress``: the share of the run's steps up to and including this one, in [0, 1]."""

    about = "how far the run is"
    columns = ("progress",)
    over_turns = True

    def after_rollout(self, view: StepView) -> Columns:
        return {"progress": torch.tensor(view.experience.progress, dtype=torch.float64)}


@register_signal
class GroupAccuracy(Signal):
    """``group_accuracy``: the share of correct responses to the response's prompt in the step."""

    about = "the accuracy of the prompt in the loss"
    columns = ("group_accuracy",)
    over_turns = True

    def after_rollout(self, view: StepView) -> Columns:
        experience = view.experience
        return {"group_accuracy": group_accuracy(experience.correct, experience.group_ids)}


@register_signal
class IsDemonstration(Signal):
    """``is_demonstration``: the response came with its prompt, or a hook remembers it; what is
    sampled beside them, and how, is the rollout's (``rollouts/demonstrations.py``)."""

    about = "responses that prompts carry, in `extra.given_responses`, or that hooks remember"
    columns = ("is_demonstration",)

    def after_rollout(self, view: StepView) -> Columns:
        return {"is_demonstration": torch.from_numpy(view.experience.responses.is_demonstration)}
