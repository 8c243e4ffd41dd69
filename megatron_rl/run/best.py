"""The best held-out score of a run so far, and when a better one is no longer waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Scores:
    """Follows one metric over the evaluations of a run; all ranks see the same metrics.

    Example: after 0.1, 0.3, 0.2 the best is 0.3 and one evaluation has passed without a better one.

    Args:
        metric: its key, larger is better, such as ``eval/accuracy``.
        stop_after: evaluations without a better score that make ``exhausted`` true; None = never.
    """

    def __init__(self, metric: str, stop_after: int | None) -> None:
        self.metric = metric
        self._stop_after = stop_after
        self.best_step: int | None = None
        self.best: float | None = None
        self.without_better = 0

    def note(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metrics of a step hold the best score so far; False where they hold none.

        Raises:
            ValueError: an evaluation did not give the metric.
        """
        value = metrics.get(self.metric)
        if value is None:
            others = sorted(key for key in metrics if key.startswith("eval/"))
            if others and self.metric not in metrics:
                raise ValueError(
                    f"checkpoint.best_metric = {self.metric}: an evaluation gives no such metric; "
                    f"choose one of {', '.join(others)}"
                )
            return False
        if self.best is not None and value <= self.best:
            self.without_better += 1
            return False
        self.best = value
        self.best_step = int(metrics["step"])
        self.without_better = 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether ``stop_after`` evaluations in a row brought no better score."""
        return self._stop_after is not None and self.without_better >= self._stop_after

    def as_text(self) -> str:
        """Example: "best eval/accuracy 0.535 at step 150"; empty before the first evaluation."""
        if self.best is None:
            return ""
        return f"best {self.metric} {self.best:.3f} at step {self.best_step}"
