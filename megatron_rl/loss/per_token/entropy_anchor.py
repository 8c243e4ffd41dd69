"""A pull of the entropy of uncertain tokens to what it was at the start of the run."""

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from megatron_rl.loss.batch import LossOutput
from megatron_rl.loss.per_token.aggregate import weighted_sum
from megatron_rl.loss.per_token.terms import LossTerm, Terms
from megatron_rl.loss.shapes import PerToken, Scalar, TokenMask
from megatron_rl.loss.whole_responses import quantile_place


class Peaks(NamedTuple):
    """Loss tokens of a minibatch whose entropy is not below a quantile of all.

    ``threshold`` lies between them and the others, halfway, so that an entropy that is computed
    once more falls on the same side. ``mean``: of the peaks, in nats.
    """

    threshold: float
    num: int
    mean: float


def find_peaks(entropies: PerToken, quantile: float) -> Peaks:
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


class EntropyAnchor(LossTerm):
    """loss += coef (m - anchor)^2, m the mean entropy of the nucleus over the peaks of a minibatch.

    The nucleus is the most likely tokens that reach the probability ``top_p``; at peaks its entropy
    is not below the ``quantile`` of the minibatch; anchor is m at the start of the run.
    Source: SIREN (arXiv 2509.25133).
    """

    reads = ("nucleus_entropy", "peaks")

    coef: NonNegativeFloat = 0.005
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8

    def term(self, terms: Terms, weights: Tensor) -> LossOutput:
        columns = (terms.column(name) for name in self.reads)
        loss, mean = anchored(*columns, terms.loss_mask, coef=self.coef)
        metrics = {"loss/entropy_anchor": loss.detach(), "entropy/nucleus_peak_mean": mean}
        return LossOutput(loss, metrics)


def anchored(
    entropy: PerToken, peaks: Float[Tensor, "4"], loss_mask: TokenMask, *, coef: float
) -> tuple[Scalar, Scalar]:
    """Contributions to coef (m - anchor)^2 and to m, the mean entropy over the peaks.

    ``peaks``: (threshold, num, mean, anchor) of the minibatch. Its mean is known before the first
    token is seen, so the gradient 2 coef (m - anchor) dm is linear in the tokens, and the value is
    spread evenly over the peaks.
    """
    threshold, num, mean, anchor = peaks.to(entropy.dtype).unbind()
    is_peak = loss_mask & (entropy.detach() >= threshold)
    gap = mean - anchor
    rise = entropy - entropy.detach()  # 0, with a gradient
    share = (1 / num.clamp(min=1)).expand_as(entropy)
    loss = weighted_sum(gap.square() + 2 * gap * rise, coef * share, is_peak)
    return loss, weighted_sum(entropy.detach(), share, is_peak)
