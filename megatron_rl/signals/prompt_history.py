"""What the rewards of each prompt were when it was visited before."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.loss import Credit
from megatron_rl.loss.per_response.histories import after_visit
from megatron_rl.loss.segments import segments_of
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class PromptHistory(Signal):
    """``visits`` to the response's prompt before this step, and ``history_mean`` and
    ``history_var`` of the rewards that the estimator saw in them; 0 for a new prompt.

    Prompts are known by uid: one that comes twice in a step has another uid the second time, and a
    second history (``data.loader``). Every rank keeps all histories. They are equal on all ranks,
    as the credit is, and do not depend on the layout.
    """

    about = "what earlier visits to a prompt were rewarded with"
    columns = ("visits", "history_mean", "history_var")

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float, float]] = {}  # visits, mean, variance

    def after_rollout(self, view: StepView) -> Columns:
        earlier = [self._of.get(uid, (0, 0.0, 0.0)) for uid in _uids(view)]
        visits, means, variances = zip(*earlier)
        return {
            "visits": torch.tensor(visits),
            "history_mean": torch.tensor(means, dtype=torch.float64),
            "history_var": torch.tensor(variances, dtype=torch.float64),
        }

    def after_credit(self, view: StepView, credit: Credit) -> None:
        assert credit.rewards is not None
        earlier = self.after_rollout(view)
        groups = segments_of(view.experience.group_ids)
        values = after_visit(credit.rewards, groups, *(earlier[name] for name in self.columns))
        lists = (each.tolist() for each in values)
        self._of.update(zip(_uids(view), zip(*lists, strict=True), strict=True))

    def state(self) -> dict[str, Any]:
        return dict(self._of)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._of = {uid: tuple(values) for uid, values in state.items()}


def _uids(view: StepView) -> list[str]:
    return [prompt.uid for prompt in view.experience.responses.prompts]
