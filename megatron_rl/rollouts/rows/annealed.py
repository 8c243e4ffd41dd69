"""What a temperature that falls within a response means to a step: the temperatures by which the
policy scores its tokens, and the metrics."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.annealing import Annealing


def policy_temperatures(
    annealing: Annealing | None, lengths: Int[np.ndarray, " responses"]
) -> Float[Tensor, " tokens"] | None:
    """Of the tokens of responses of such lengths, for the policy; None: all have its own."""
    if annealing is None or not annealing.in_policy:
        return None
    return annealing.of_lengths(torch.from_numpy(lengths))


def temperature_metrics(
    annealing: Annealing | None, lengths: Int[Tensor, " responses"]
) -> dict[str, float]:
    """Of the tokens that the sampler drew; nothing where it has one temperature."""
    if annealing is None:
        return {}
    by_position = annealing.of_positions(torch.arange(int(lengths.max()))).double()
    sums = by_position.cumsum(0)[lengths - 1]
    return {
        "rollout/temperature_mean": (sums.sum() / lengths.sum()).item(),
        "rollout/temperature_min": by_position.min().item(),
        "rollout/anneal_decay_tokens": annealing.decay_tokens,
    }
