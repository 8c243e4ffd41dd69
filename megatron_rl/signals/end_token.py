"""One more token behind every response, for methods that read how likely it is there.

The policy is given sequences that are one token longer, in the update alone; to it they are
responses like all. What comes back is taken apart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_rl.passes import LocalBatch, TokenScores, TokenView
from megatron_rl.runtime.device import to_device
from megatron_rl.signals.base import Columns, Signal, StepView
from megatron_rl.signals.registry import register_signal


@register_signal
class EndToken(Signal):
    """``end_logprobs`` of the token ``token_id`` behind responses, with gradient, of the responses
    ``end_index`` alone; ``end_start``: their mean over the first minibatch of the run; ``was_cut``:
    the response has reached the limit."""

    about = "the logprob of one token after every response"
    columns = ("end_logprobs", "end_index", "end_start", "was_cut")
    extra_tokens = 1

    def __init__(self, *, token_id: int) -> None:
        self._token_id = token_id
        self.start: float | None = None

    def after_rollout(self, view: StepView) -> Columns:
        return {"was_cut": view.experience.truncated}

    def before_minibatch(self, view: StepView) -> Columns:
        if self.start is None:
            longer = EndTokens.of(view.local, self._token_id)
            scores = view.score(batch=longer.batch)
            # At the first token of each response, so that the sum over it is the number itself.
            lengths = view.local.batch.response_lengths
            values = np.zeros(int(lengths.sum()), dtype=np.float32)
            values[lengths.cumsum(0) - lengths] = scores.logprobs[longer.is_end].numpy()
            self.start = view.response_sums(values)[list(view.rows)].mean().item()
        return {"end_start": torch.tensor(self.start, dtype=torch.float64)}

    def extend(self, batch: LocalBatch, step: int) -> EndTokens:
        return EndTokens.of(batch, self._token_id)

    def state(self) -> dict[str, Any]:
        return {"start": self.start}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.start = state.get("start")


@dataclass(frozen=True)
class EndTokens:
    """A batch with a token behind each response."""

    batch: LocalBatch
    is_end: Bool[Tensor, " tokens"]  # whether a response token is the added one
    plain: Int[Tensor, " tokens"]  # the index of the other tokens in the batch without these
    row: Int[Tensor, " tokens"]  # the number of the token's response in the step

    @classmethod
    def of(cls, local: LocalBatch, token_id: int) -> EndTokens:
        """The end token was not sampled: where tokens have temperatures, its temperature is 1."""
        batch = local.batch
        lengths = batch.response_lengths + 1
        place = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        is_end = torch.zeros(len(place), dtype=torch.bool)
        is_end[lengths.cumsum(0) - 1] = True
        # In front of the tokens of sequence i stand the end tokens of i sequences.
        plain = torch.arange(len(place)) - place
        whole = batch.lengths + 1
        token_ids = torch.full((int(whole.sum()),), token_id, dtype=batch.token_ids.dtype)
        sequence = torch.repeat_interleave(torch.arange(batch.num_responses), batch.lengths)
        token_ids[torch.arange(len(sequence)) + sequence] = batch.token_ids
        temperatures = None
        if batch.temperatures is not None:
            temperatures = torch.ones(len(place))
            temperatures[~is_end] = batch.temperatures
        longer = replace(
            batch, token_ids=token_ids, response_lengths=lengths, temperatures=temperatures
        )
        row = place if local.rows is None else local.rows[place]
        return cls(replace(local, batch=longer), is_end, plain, row)

    def without(self, scores: TokenScores) -> TokenScores:
        return scores.map(lambda values: values[~self.is_end])

    def split(self, view: TokenView) -> tuple[TokenView, Columns]:
        is_end = self.is_end[view.index]
        own = (~is_end).nonzero().flatten()
        ends = is_end.nonzero().flatten()
        device = view.logprobs.device
        here = own.to(device)
        plain = view.select(self.plain[view.index][own], lambda x: x.index_select(0, here))
        columns = {
            "end_logprobs": view.logprobs.index_select(0, ends.to(device)),
            "end_index": to_device(self.row[view.index][ends], device),
        }
        return plain, columns
