"""What estimators and shapers read: the responses of a rollout step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss.batch import ResponseBatch
from megatron_rl.loss.segments import Segments

# Properties of Evidence that are an optional field of ResponseBatch: who names one reads it.
OPTIONAL = (
    "progress",
    "prompt_confidence",
    "response_confidence",
    "visits",
    "history_mean",
    "history_var",
)


@dataclass(frozen=True)
class Evidence:
    """All responses of a rollout step; a function that names a field or property is given it.

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

    @property
    def prompt_confidence(self) -> Float[Tensor, " responses"]:
        """Of the old policy, in what it finds least likely of the prompt."""
        assert self.batch.prompt_confidence is not None
        return self.batch.prompt_confidence.to(self.dtype)

    @property
    def response_confidence(self) -> Float[Tensor, " responses"]:
        """The same of the response."""
        assert self.batch.response_confidence is not None
        return self.batch.response_confidence.to(self.dtype)

    @property
    def visits(self) -> Int[Tensor, " responses"]:
        """To the response's prompt, before this step."""
        assert self.batch.visits is not None
        return self.batch.visits

    @property
    def history_mean(self) -> Float[Tensor, " responses"]:
        """Of the rewards of those visits."""
        assert self.batch.history_mean is not None
        return self.batch.history_mean

    @property
    def history_var(self) -> Float[Tensor, " responses"]:
        """The same of their variance."""
        assert self.batch.history_var is not None
        return self.batch.history_var

    @property
    def progress(self) -> float:
        """Share of the run's steps that there are up to this one."""
        assert self.batch.progress is not None
        return self.batch.progress

    @property
    def dtype(self) -> torch.dtype:
        """Of the rewards: float32 or float64."""
        return self.rewards.dtype
