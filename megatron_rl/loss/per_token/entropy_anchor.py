"""A pull of the entropy of uncertain tokens to what it was at the start of the run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.loss.per_token.aggregate import weighted_sum
from megatron_rl.loss.per_token.whole_responses import quantile_place


class Peaks(NamedTuple):
    """Loss tokens of a minibatch whose entropy is not below a quantile of all.

    ``threshold`` lies between them and the others, halfway, so that an entropy that is computed
    once more falls on the same side. ``mean``: of the peaks, in nats.
    """

    threshold: float
    num: int
    mean: float


def find_peaks(entropies: Float[Tensor, " tokens"], quantile: float) -> Peaks:
    """Of all loss tokens of a minibatch, in any order: H >= the quantile, interpolated linearly."""
    ordered = entropies.double().sort().values
    place = float(quantile_place(torch.tensor(len(ordered)), quantile))
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    bound = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    first = int((ordered < bound).sum())
    lowest = ordered[first].item()
    # Where none is below, anything under the lowest will do.
    threshold = lowest - 1
    if first > 0:
        threshold = (lowest + ordered[first - 1].item()) / 2
    return Peaks(threshold, len(ordered) - first, ordered[first:].mean().item())


def anchored(
    entropy: Float[Tensor, " tokens"],
    peaks: Float[Tensor, "4"],
    loss_mask: Bool[Tensor, " tokens"],
    *,
    coef: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Contributions to coef (m - anchor)^2 and to m, the mean entropy over the peaks.

    ``peaks``: (threshold, num, mean, anchor) of the minibatch. Its mean is known before the first
    token is seen, so the gradient 2 coef (m - anchor) dm is linear in the tokens, and the value is
    spread evenly over the peaks.
    Source: SIREN (arXiv 2509.25133).
    """
    threshold, num, mean, anchor = peaks.to(entropy.dtype).unbind()
    is_peak = loss_mask & (entropy.detach() >= threshold)
    gap = mean - anchor
    rise = entropy - entropy.detach()  # 0, with a gradient
    share = (1 / num.clamp(min=1)).expand_as(entropy)
    loss = weighted_sum(gap.square() + 2 * gap * rise, coef * share, is_peak)
    return loss, weighted_sum(entropy.detach(), share, is_peak)
