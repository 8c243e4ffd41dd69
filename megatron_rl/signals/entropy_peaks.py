"""The tokens of a minibatch where the policy is most uncertain."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.loss.per_token.entropy_anchor import find_peaks
from megatron_rl.passes import Output
from megatron_rl.policy.passes.nucleus import nucleus_entropy
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class EntropyPeaks(Signal):
    """``nucleus_entropy``: of the most likely tokens that reach the probability ``top_p``, in nats,
    with gradient. ``peaks``: where it is not below the ``quantile`` of the minibatch, by a pass of
    its own before the update: threshold, number and mean of those tokens, and the anchor, their
    mean in the first minibatch of the run."""

    about = "the entropy of the nucleus at every token, by a pass before"
    columns = ("peaks",)
    token_columns = ("nucleus_entropy",)

    def __init__(self, *, top_p: float, quantile: float) -> None:
        self._quantile = quantile
        self._output = Output("nucleus_entropy", top_p, True, nucleus_entropy)
        self.update_outputs = (self._output,)
        self.anchor: float | None = None  # set by the first minibatch of a run

    def before_minibatch(self, view: StepView) -> Columns:
        entropies = view.score([self._output]).columns["nucleus_entropy"][view.loss_mask]
        found = find_peaks(view.ranks.of_all_tokens(entropies), self._quantile)
        if self.anchor is None:
            self.anchor = found.mean
        return {"peaks": torch.tensor([*found, self.anchor], dtype=torch.float64)}

    def state(self) -> dict[str, Any]:
        return {"anchor": self.anchor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.anchor = state.get("anchor")
