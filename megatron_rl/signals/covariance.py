"""Which tokens of a minibatch have a large covariance of logprob and advantage."""

import math

import torch

from megatron_rl.loss.per_token.covariance import choose, covariances
from megatron_rl.loss.segments import lifted
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal

PLACE = "token_place"


@register_signal
class TokenPlace(Signal):
    """``token_place``: the index of each token among all tokens of the step, row after row."""

    about = "where each token stands in the step"
    token_columns = (PLACE,)

    def after_rollout(self, view: StepView) -> Columns:
        lengths = torch.from_numpy(view.experience.responses.lengths)
        batch = view.local.batch
        assert view.local.rows is not None
        first = (lengths.cumsum(0) - lengths)[view.local.rows]
        # From the index on this rank to that in the step: the same for all tokens of a row.
        shift = first - batch.response_offsets[:-1]
        index = batch.response_index
        return {PLACE: shift[index] + torch.arange(len(index))}


@register_signal
class CovariantTokens(Signal):
    """``chosen_places``: a ``share`` of the loss tokens of a minibatch, by a pass of its own before
    the update: those of the largest covariance or, where there are bounds, drawn among those with a
    covariance in [``cov_low``, ``cov_high``]. The column holds -1, then their places, sorted.

    Draws depend on the seed, the step and the number of its minibatch, not on the layout.
    """

    about = "the covariance of logprob and advantage at every token, by a pass before"
    columns = ("chosen_places",)

    def __init__(
        self, *, share: float, seed: int, cov_low: float = -math.inf, cov_high: float = math.inf
    ) -> None:
        self._share = share
        self._bounds = (cov_low, cov_high)
        self._seed = seed
        self._draw = torch.Generator()
        self._step: int | None = None

    def before_minibatch(self, view: StepView) -> Columns:
        credit, mask = view.experience.credit, view.loss_mask
        assert credit is not None
        own = torch.from_numpy(view.tokens[PLACE])[mask]
        # float64 holds every place.
        places, order = view.ranks.of_all_tokens(own.double()).long().sort()
        logprobs = view.ranks.of_all_tokens(lifted(view.score().logprobs)[mask])[order].double()
        ends = torch.from_numpy(view.experience.responses.lengths).cumsum(0)
        rows = torch.searchsorted(ends, places, right=True)
        found = covariances(logprobs, credit.advantages.double()[rows])
        keys = -found
        if self._bounds != (-math.inf, math.inf):
            keys = torch.rand(len(found), generator=self._drawing(view), dtype=found.dtype)
        chosen = places[choose(found, keys, self._share, *self._bounds)].sort().values
        return {"chosen_places": torch.cat([torch.tensor([-1]), chosen])}

    def _drawing(self, view: StepView) -> torch.Generator:
        """Seeded anew at each step, so that a resumed run draws like one that was not stopped."""
        step = view.experience.step
        if step != self._step:
            self._step = step
            # A hash of integers is the same in every process, unlike that of a text.
            self._draw.manual_seed(hash((self._seed, step)) % 2**63)
        return self._draw
