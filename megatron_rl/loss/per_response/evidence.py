"""What estimators and shapers read: the responses of a rollout step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss.batch import ResponseBatch, given
from megatron_rl.loss.segments import Segments
from megatron_rl.loss.shapes import PerGroup, PerResponse, ResponseCounts, ResponseFlags, Scalar


@dataclass(frozen=True)
class Evidence:
    """All responses of a step; a function that names a field, property or column is given it.

    ``rewards`` hold the KL where the method places it in the reward; ``plain_rewards`` never do.
    ``accuracy`` is the share of correct responses by group, ``share`` the same at each response,
    ``omega`` the step's mean plain reward clipped to [0, 1]. ``eps``, ``ddof``: the method's.
    """

    batch: ResponseBatch
    rewards: PerResponse
    plain_rewards: PerResponse
    groups: Segments
    accuracy: PerGroup
    omega: Scalar
    eps: float
    ddof: int

    @property
    def correct(self) -> ResponseFlags:
        return self.batch.correct

    @property
    def lengths(self) -> ResponseCounts:
        """Response tokens."""
        return self.batch.response_tokens

    @property
    def share(self) -> PerResponse:
        """The group's accuracy, at each response."""
        return self.groups.broadcast(self.accuracy)

    def column(self, name: str) -> Tensor:
        """What a signal gives under ``name``; a function that names it as an input is given it."""
        return given(self.batch.columns.get(name), "ResponseBatch", name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rewards: float32 or float64."""
        return self.rewards.dtype
