"""What a step learns from: the responses of one rollout, and what the learner adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.loss import Credit
from megatron_rl.types import Completion, Prompt, Score, SequenceBatch, TokenScores


@dataclass(frozen=True)
class Response:
    """One completion with its text and verdict."""

    prompt: Prompt
    completion: Completion
    text: str
    score: Score


Groups = Sequence[Sequence[Response]]


@dataclass(frozen=True)
class Experience:
    """One rollout: N responses in canonical (prompt, response) order, equal on every rank.

    ``Learner.score`` fills in the last three fields. All tensors are on the host: credit and
    bookkeeping run there, and a micro-batch takes what it needs to the device.
    """

    responses: Sequence[Response]
    sequences: SequenceBatch
    group_ids: Int[Tensor, " responses"]
    rewards: Float[Tensor, " responses"]
    correct: Bool[Tensor, " responses"]
    truncated: Bool[Tensor, " responses"]
    sampler_logprobs: Float[Tensor, " tokens"]
    discarded_groups: int = 0  # thrown away by dynamic sampling
    tries: int = 1  # rounds of generation of dynamic sampling
    hook_metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase: rollout, reward
    credit: Credit | None = None
    ref: TokenScores | None = None  # None: the method needs none
    old: TokenScores | None = None  # None: see ``on_policy``

    @property
    def num_groups(self) -> int:
        return int(self.group_ids[-1]) + 1

    @property
    def on_policy(self) -> bool:
        """Of a scored experience: its only update takes the old logprobs from its own forward,
        where they are the current ones without gradient (the ratio is 1)."""
        return self.old is None

    @property
    def old_logprobs(self) -> Float[Tensor, " tokens"]:
        """Of a scored experience that is not ``on_policy``."""
        assert self.old is not None, "an on-policy step has old logprobs in its update only"
        return self.old.logprobs


def experience_of(groups: Groups) -> Experience:
    """``groups`` of responses, flattened into the two layouts of ``megatron_rl.types``."""
    responses = [response for group in groups for response in group]
    logprobs = [
        np.asarray(response.completion.sampler_logprobs, dtype=np.float32) for response in responses
    ]
    pairs = [(response.prompt.token_ids, response.completion.token_ids) for response in responses]
    sizes = torch.tensor([len(group) for group in groups])
    group_ids = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    rewards = [response.score.reward for response in responses]
    return Experience(
        responses=responses,
        sequences=sequence_batch(
            pairs, group_ids, [response.prompt.images for response in responses]
        ),
        group_ids=group_ids,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        correct=torch.tensor([response.score.correct for response in responses]),
        truncated=torch.tensor([response.completion.truncated for response in responses]),
        sampler_logprobs=torch.from_numpy(np.concatenate(logprobs)),
    )
