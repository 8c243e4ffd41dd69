"""One more token behind every response, for methods that ask how likely it is there.

The policy is given sequences that are one token longer, in the update alone; to it they are
responses like all. What comes back is taken apart here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_rl.types import Share, TokenScores, TokenView


@dataclass(frozen=True)
class EndTokens:
    """Of the response tokens of a batch with the token behind each response.

    ``is_end``: it is that token. ``plain``: its place in the batch without them, for the others.
    ``row``: of the batch.
    """

    is_end: Bool[Tensor, " tokens"]
    plain: Int[Tensor, " tokens"]
    row: Int[Tensor, " tokens"]

    @classmethod
    def of(cls, response_lengths: Int[np.ndarray, " rows"]) -> EndTokens:
        """``response_lengths``: without them."""
        lengths = torch.from_numpy(response_lengths) + 1
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        is_end = torch.zeros(len(row), dtype=torch.bool)
        is_end[lengths.cumsum(0) - 1] = True
        # In front of row i stand the end tokens of i rows.
        return cls(is_end, torch.arange(len(row)) - row, row)

    def without(self, scores: TokenScores) -> TokenScores:
        """Of the responses as they are; on the host."""
        own = ~self.is_end
        entropy = scores.entropy
        return TokenScores(scores.logprobs[own], None if entropy is None else entropy[own])

    def split(self, view: TokenView) -> tuple[TokenView, Tensor, Int[Tensor, " ends"]]:
        """The view of the plain batch, and the logprobs of the tokens behind responses, with their
        rows (on the host)."""
        is_end = self.is_end[view.index]
        own = (~is_end).nonzero().flatten()
        ends = is_end.nonzero().flatten()
        device = view.logprobs.device

        def kept(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.index_select(0, own.to(device))

        plain = replace(
            view,
            index=self.plain[view.index][own],
            logprobs=view.logprobs.index_select(0, own.to(device)),
            entropy=kept(view.entropy),
            topk_logprobs=kept(view.topk_logprobs),
            is_argmax=kept(view.is_argmax),
            nucleus_entropy=kept(view.nucleus_entropy),
        )
        logprobs = view.logprobs.index_select(0, ends.to(device))
        return plain, logprobs, self.row[view.index][ends]


def with_end_token(share: Share, token_id: int) -> Share:
    """``share`` with the token behind each response. Nobody has sampled it: where each token has a
    temperature, that of this one is 1."""
    batch = share.batch
    lengths = batch.lengths + 1
    token_ids = torch.full((int(lengths.sum()),), token_id, dtype=batch.token_ids.dtype)
    row = torch.repeat_interleave(torch.arange(batch.num_responses), batch.lengths)
    token_ids[torch.arange(len(row)) + row] = batch.token_ids
    temperatures = None
    if batch.temperatures is not None:
        temperatures = torch.ones(len(batch.temperatures) + batch.num_responses)
        own = torch.arange(len(batch.temperatures)) + batch.response_index
        temperatures[own] = batch.temperatures
    longer = replace(
        batch,
        token_ids=token_ids,
        response_lengths=batch.response_lengths + 1,
        temperatures=temperatures,
    )
    return Share(longer, share.microbatches)
