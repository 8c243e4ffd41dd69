"""Logprobs of each response: the old policy's, their KL to the reference, how far they moved."""

import torch
from torch import Tensor

from megatron_rl.loss.per_token import kl
from megatron_rl.loss.segments import lifted
from megatron_rl.passes import Output
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal

ENTROPY = Output("entropy")


def totals(values: Tensor, view: StepView) -> Tensor:
    """The sum over the loss tokens of each row of this rank, ``[rows]``."""
    batch = view.local.batch
    kept = torch.where(view.loss_mask, values, torch.zeros_like(values))
    sums = torch.zeros(batch.num_responses, dtype=values.dtype)
    return sums.index_add(0, batch.response_index, kept)


def means(values: Tensor, view: StepView) -> Tensor:
    """The same over their number; of a response without kept tokens 0 / 1."""
    return totals(values, view) / totals(torch.ones_like(values), view).clamp(min=1)


@register_signal
class ResponseLogprobs(Signal):
    """``sum_logprobs`` and ``mean_logprobs`` of the old policy over the tokens of a response."""

    about = "the old policy's logprobs before the credit"
    columns = ("sum_logprobs", "mean_logprobs")
    scores = ("old",)

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        old = lifted(view.experience.old.logprobs)
        found = {"sum_logprobs": totals(old, view), "mean_logprobs": means(old, view)}
        return view.of_all_rows(found)


@register_signal
class MeanEntropy(Signal):
    """``mean_entropy`` of the old policy over the tokens of a response, in nats."""

    about = "the old policy's entropies before the credit"
    columns = ("mean_entropy",)
    scores = ("old",)
    score_outputs = (ENTROPY,)

    def after_rollout(self, view: StepView) -> Columns:
        assert view.experience.old is not None
        entropy = lifted(view.experience.old.columns[ENTROPY.name])
        return view.of_all_rows({"mean_entropy": means(entropy, view)})


@register_signal
class ReferenceKl(Signal):
    """``kl``: the sum over the tokens of a response of the method's KL estimator at (old, ref)."""

    about = "the old policy's and the reference's logprobs before the credit"
    columns = ("kl",)
    scores = ("old", "ref")

    def __init__(self, *, kl_estimator: str) -> None:
        self._estimate = kl.ESTIMATORS[kl_estimator]

    def after_rollout(self, view: StepView) -> Columns:
        old, ref = view.experience.old, view.experience.ref
        assert old is not None and ref is not None
        logprobs = lifted(old.logprobs)
        estimate = self._estimate(logprobs, lifted(ref.logprobs).to(logprobs.dtype))
        return view.of_all_rows({"kl": totals(estimate, view)})


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
