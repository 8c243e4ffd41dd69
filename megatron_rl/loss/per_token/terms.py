"""What policy losses, aggregations and corrections read: the tokens of one micro-batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_rl.knobs import Piece
from megatron_rl.loss.batch import LossOutput, TokenBatch, given
from megatron_rl.loss.segments import lifted
from megatron_rl.loss.shapes import (
    PerToken,
    ResponseCounts,
    ResponseFlags,
    Scalar,
    TokenIndex,
    TokenMask,
)
from megatron_rl.loss.whole_responses import SequenceGather, WholeResponses

SequenceSum = Callable[[Tensor], Tensor]
# Properties of Terms that a run has to give: a function that names one reads it like a column.
OPTIONAL = ("entropy", "ref_logprobs")


@dataclass(frozen=True)
class Terms:
    """The tokens of a micro-batch in float32 or float64, with the denominators of the minibatch.

    A function that names a field, property or column is given it. ``logprobs`` and ``log_ratio``
    (current minus old) are 0 outside the mask, so that nothing there reaches a value or a gradient;
    ``advantages`` stand at each token. ``sequence_sum`` adds per-response sums over the ranks that
    share a response; ``sequence_gather`` is that of ``WholeResponses``.
    """

    batch: TokenBatch
    logprobs: PerToken
    log_ratio: PerToken
    advantages: PerToken
    response_loss_tokens: ResponseCounts
    num_responses: int
    num_tokens: int
    sequence_sum: SequenceSum
    sequence_gather: SequenceGather
    response_limit: int | None  # tokens of the longest response the run allows, where known

    @property
    def loss_mask(self) -> TokenMask:
        return self.batch.loss_mask

    @property
    def response_index(self) -> TokenIndex:
        return self.batch.response_index

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.logprobs.dtype

    @property
    def gap(self) -> PerToken:
        """old_logprobs - sampler_logprobs, 0 outside the mask, detached."""
        old = lifted(self.batch.old_logprobs).to(self.dtype)
        gap = old - lifted(self._field("sampler_logprobs")).to(self.dtype)
        return gap.masked_fill(~self.loss_mask, 0).detach()

    @property
    def entropy(self) -> PerToken:
        """The entropy of the current policy, in nats, 0 outside the mask, detached."""
        return self.column("entropy").detach()

    def column(self, name: str) -> Tensor:
        """What a signal gives under ``name``, floats in ``dtype``; of tokens 0 outside the mask."""
        per_token = name in self.batch.token_columns
        columns = self.batch.token_columns if per_token else self.batch.columns
        values = given(columns.get(name), "TokenBatch", name)
        if not values.is_floating_point():
            return values
        values = lifted(values).to(self.dtype)
        if not per_token:
            return values
        # Rows of a token, e.g. its most likely tokens, are filled as a whole.
        outside = ~self.loss_mask.reshape(-1, *[1] * (values.ndim - 1))
        return values.masked_fill(outside, 0)

    @property
    def correct(self) -> ResponseFlags:
        return self._field("correct")

    @property
    def group_ids(self) -> ResponseCounts:
        """Which prompt."""
        return self._field("group_ids")

    @property
    def ref_logprobs(self) -> PerToken:
        """Logprobs of the reference, 0 outside the mask."""
        return lifted(self._field("ref_logprobs")).to(self.dtype).masked_fill(~self.loss_mask, 0)

    @property
    def responses(self) -> WholeResponses:
        """The tokens of whole responses, for order statistics."""
        num_responses = self.response_loss_tokens.numel()
        return WholeResponses(
            self.response_index, self.loss_mask, num_responses, self.sequence_gather
        )

    def _field(self, name: str) -> Tensor:
        return given(getattr(self.batch, name), "TokenBatch", name)

    def response_mean(self, values: PerToken) -> PerToken:
        """The mean over a response's loss tokens, at each of them, with gradient."""
        kept = torch.where(self.loss_mask, values, torch.zeros_like(values))
        counts = self.response_loss_tokens
        none_yet = torch.zeros(counts.shape, dtype=kept.dtype, device=kept.device)
        sums = none_yet.index_add(0, self.response_index, kept)
        return (self.sequence_sum(sums) / counts.clamp(min=1))[self.response_index]

    def mean(self, values: Tensor) -> Scalar:
        """Contribution to the mean over the loss tokens of the minibatch, detached."""
        kept = values.detach().to(self.dtype).masked_fill(~self.loss_mask, 0)
        return kept.sum() / max(self.num_tokens, 1)


class LossTerm(Piece, ABC):
    """What a section of the method adds to the loss beside policy, KL and entropy."""

    reads: ClassVar[tuple[str, ...]] = ()  # columns

    @abstractmethod
    def term(self, terms: Terms, weights: PerToken) -> LossOutput:
        """The term's part of the minibatch loss, and metrics; ``weights``: of ``aggregate``."""


def terms_of(
    batch: TokenBatch,
    sequence_sum: SequenceSum,
    response_limit: int | None,
    sequence_gather: SequenceGather = lambda columns: columns,
) -> Terms:
    """The batch as the functions read it; denominators are its own where none are given."""
    mask = batch.loss_mask
    # masked_fill, not a product: a NaN outside the mask times 0 would stay NaN.
    logprobs = lifted(batch.logprobs).masked_fill(~mask, 0)
    old_logprobs = lifted(batch.old_logprobs).to(logprobs.dtype).masked_fill(~mask, 0)
    lengths = batch.response_loss_tokens
    if lengths is None:
        none_yet = torch.zeros(batch.advantages.shape, dtype=torch.int64, device=mask.device)
        lengths = none_yet.index_add(0, batch.response_index, mask.long())
    num_responses = batch.num_responses
    if num_responses is None:
        num_responses = batch.advantages.numel()
    num_tokens = batch.num_tokens
    if num_tokens is None:
        num_tokens = int(mask.sum())
    return Terms(
        batch=batch,
        logprobs=logprobs,
        log_ratio=logprobs - old_logprobs,
        advantages=batch.advantages.to(logprobs.dtype)[batch.response_index],
        response_loss_tokens=lengths,
        num_responses=num_responses,
        num_tokens=num_tokens,
        sequence_sum=sequence_sum,
        sequence_gather=sequence_gather,
        response_limit=response_limit,
    )
