"""What estimators and shapers read: the responses of a rollout step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss.batch import ResponseBatch, given
from megatron_rl.loss.segments import Segments


@dataclass(frozen=True)
class Evidence:
    """All responses of a rollout step; a function that names a field, property or column is
    given it.

    ``rewards`` hold the KL where the method places it in the reward; ``plain_rewards`` never do.
    ``accuracy`` is the share of correct responses by group, ``share`` the same at each response,
    ``omega`` the mean plain reward of the step clipped to [0, 1]. ``eps`` and ``ddof`` are the
    method's.
    """

    batch: ResponseBatch
    rewards: Float[Tensor, " responses"]
    plain_rewards: Float[Tensor, " responses"]
    groups: Segments
    accuracy: Float[Tensor, " groups"]
    omega: Float[Tensor, ""]
    eps: float
    ddof: int

    @property
    def correct(self) -> Bool[Tensor, " responses"]:
        return self.batch.correct

    @property
    def lengths(self) -> Int[Tensor, " responses"]:
        """Response tokens."""
        return self.batch.response_tokens

    @property
    def share(self) -> Float[Tensor, " responses"]:
        """The group's accuracy, at each response."""
        return self.groups.broadcast(self.accuracy)

    def column(self, name: str) -> Tensor:
        """What a signal gives under ``name``; a function that names it as an input is given it."""
        return given(self.batch.columns.get(name), "ResponseBatch", name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the rewards: float32 or float64."""
        return self.rewards.dtype
