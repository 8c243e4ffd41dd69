"""What is remembered of each prompt from one visit to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Histories:
    """Statistics of the rewards of every prompt visited so far, by uid: a prompt that comes twice
    in a step has another one for its second place there, and a second history (``data.loader``).

    Every rank has all of them and notes the same, for credit is computed alike everywhere: they
    depend on no layout. A checkpoint holds them exactly, and what was measured at the
    start of the run.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float, float]] = {}  # visits, mean, variance
        self.starts: dict[str, float] = {}  # what was measured before the first update, by name

    def fields(self, uids: Sequence[str]) -> dict[str, Tensor]:
        """The fields of ResponseBatch for responses to these prompts; 0 of a prompt that is
        new."""
        visits, means, variances = zip(*[self._of.get(uid, (0, 0.0, 0.0)) for uid in uids])
        return {
            "visits": torch.tensor(visits),
            "history_mean": torch.tensor(means, dtype=torch.float64),
            "history_var": torch.tensor(variances, dtype=torch.float64),
        }

    def note(self, uids: Sequence[str], fields: Mapping[str, Tensor]) -> None:
        """``fields`` with the visit in them, see ``Credit.history``."""
        columns = (fields[name].tolist() for name in ("visits", "history_mean", "history_var"))
        self._of.update(zip(uids, zip(*columns, strict=True), strict=True))

    def state(self) -> dict[str, Any]:
        """A copy for a checkpoint."""
        return dict(self._of)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._of = {uid: tuple(values) for uid, values in state.items()}

    def restore_all(self, extra: Mapping[str, Any]) -> None:
        """From what a checkpoint holds beside the policy; older ones have nothing of it."""
        self.restore(extra.get("histories", {}))
        self.starts = dict(extra.get("starts", {}))
