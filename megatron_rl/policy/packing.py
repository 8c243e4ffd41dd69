"""One micro-batch as this rank sees it: sequences packed end to end, cut over context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from megatron_rl.policy.attention import Packing
from megatron_rl.runtime.transfer import to_device
from megatron_rl.types import SequenceBatch


@dataclass(frozen=True)
class Multiples:
    """What lengths must divide by: each sequence by ``sequence`` (two chunks for every context rank), their total by ``total``
    (every tensor rank's share under sequence parallelism, and what the number format asks of each rank's tokens)."""

    sequence: int
    total: int


def multiples(context: int, tensor: int, sequence_parallel: bool, rank_tokens: int = 1) -> Multiples:
    """The one home of padding rules. ``rank_tokens``: what the tokens of one rank must divide by (FP8: 16, 32 or 128).

    Examples: ``multiples(2, 2, True)`` is ``Multiples(sequence=4, total=4)``, ``multiples(2, 2, True, 16)`` has a total of 64.
    """
    each = 2 * context if context > 1 else 1
    ranks = context * tensor if sequence_parallel else context if rank_tokens > 1 else 1
    return Multiples(each, math.lcm(each, ranks * rank_tokens))


@dataclass(frozen=True)
class Microbatch:
    """Tokens of this context rank (t of them), and which of their states predict a response token.

    ``rows[i]`` is a place among the t tokens, ``targets[i]`` a token that follows it (several follow the end of a shared prompt),
    ``index[i]`` that token's place in the response-token layout of the batch (on the host, unlike the others). An empty micro-batch
    holds one dummy sequence and no rows.
    """

    token_ids: Int[Tensor, "1 t"]
    position_ids: Int[Tensor, "1 t"]
    packing: Packing
    rows: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    index: Int[Tensor, " n"]
    empty: bool


DUMMY = SequenceBatch(torch.zeros(2, dtype=torch.long), torch.tensor([1]), torch.tensor([1]))
_NOTHING = torch.zeros(0, dtype=torch.long)


def borrowed_prompts(
    batch: SequenceBatch, chosen: Int[Tensor, " sequences"], share: bool
) -> tuple[Int[Tensor, " sequences"], Int[Tensor, " sequences"]]:
    """``(owners, shared)``: the place among ``chosen`` of the sequence that packs the prompt of each (the first of neighbours with the
    same prompt, or, when prompts are not shared, the sequence itself), and how many tokens it borrows there (0 of itself)."""
    here = torch.arange(len(chosen))
    if not share or batch.prompt_ids is None:
        return here, torch.zeros_like(here)
    ids = batch.prompt_ids[chosen]
    follows = torch.nn.functional.pad(ids[1:] == ids[:-1], (1, 0))
    owners = torch.where(follows, 0, here).cummax(0).values
    prompts = batch.prompt_lengths[chosen]
    assert torch.equal(prompts, prompts[owners]), "prompts of different lengths have the same prompt id"
    return owners, torch.where(follows, prompts, 0)


def padded_lengths(
    batch: SequenceBatch, rows: Sequence[int], rule: Multiples, at_least: int = 0, share: bool = False
) -> Int[Tensor, " sequences"]:
    """Tokens each sequence takes in the packed micro-batch of ``rows`` (none: the dummy sequence), over all context ranks; the
    last one is stretched to a total that fits ``rule`` and is no less than ``at_least``."""
    chosen = torch.tensor(list(rows) or [0])
    batch = batch if rows else DUMMY
    lengths = batch.lengths[chosen] - borrowed_prompts(batch, chosen, share)[1]
    padded = (lengths + rule.sequence - 1) // rule.sequence * rule.sequence
    total = max(int(padded.sum()), at_least)
    padded[-1] += -(-total // rule.total) * rule.total - int(padded.sum())
    return padded


def pack(
    batch: SequenceBatch,
    rows: Sequence[int],
    rule: Multiples,
    context_rank: int,
    context: int,
    device: torch.device,
    *,
    at_least: int = 0,
    share: bool = False,
) -> Microbatch:
    """The micro-batch of sequences ``rows`` of ``batch`` on context rank ``context_rank`` of ``context``, of ``at_least`` so many
    tokens over all context ranks. ``share`` (one context rank only): neighbouring sequences with the same prompt pack it once.

    Raises ValueError for a row without prompt (its first response token has nothing to be predicted from) or response.
    """
    assert not (share and context > 1), "shared prompts are not cut over context ranks"
    padded = padded_lengths(batch, rows, rule, at_least, share)
    if not rows:
        batch = DUMMY
    chosen = torch.tensor(list(rows) or [0])
    prompts, responses = batch.prompt_lengths[chosen], batch.response_lengths[chosen]
    short = chosen[(prompts < 1) | (responses < 1)]
    if len(short):
        raise ValueError(f"packing: row {int(short[0])} has an empty prompt or response; every sequence needs at least one token of each")
    lengths = prompts + responses
    owners, shared = borrowed_prompts(batch, chosen, share)
    # Everything below is over the padded tokens of all context ranks, then cut to this rank.
    sequence = torch.repeat_interleave(torch.arange(len(chosen)), padded)
    starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    position = torch.arange(len(sequence)) - (starts[:-1] - shared)[sequence]
    if context > 1:
        chunk = position // (padded // (2 * context))[sequence]
        mine = (chunk == context_rank) | (chunk == 2 * context - 1 - context_rank)
        sequence, position = sequence[mine], position[mine]
    source = batch.offsets[chosen][sequence] + position
    last = batch.token_ids.numel() - 1
    token_ids = torch.where(position < lengths[sequence], batch.token_ids[source.clamp(max=last)], 0)
    places, targets, index = _predictions(batch, chosen, sequence, position, starts[:-1][owners], shared) if rows else [_NOTHING] * 3
    boundaries, sharing = starts, {}
    if shared.any():
        # One run of rotary angles, chosen by position.
        boundaries, sharing = torch.tensor([0, len(sequence)]), dict(shared=shared, owner=owners, positions=to_device(position, device))
    boundaries, longest = to_device(boundaries.to(torch.int32), device), int((padded + shared).max())
    packing = Packing(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest,
        lengths=padded, **sharing,
    )  # fmt: skip
    return Microbatch(
        token_ids=to_device(token_ids[None], device),
        position_ids=to_device(position[None], device),
        packing=packing,
        rows=to_device(places, device),
        targets=to_device(targets, device),
        index=index,
        empty=not rows,
    )


def _predictions(
    batch: SequenceBatch, chosen: Tensor, sequence: Tensor, position: Tensor, prompt_starts: Tensor, shared: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(rows, targets, index)`` of a Microbatch, in the order of the sequences: which of the packed tokens (``sequence``,
    ``position``) predict a response token. The first token of a response whose prompt is packed elsewhere is predicted there."""
    prompts, lengths = batch.prompt_lengths[chosen], batch.lengths[chosen]
    places = ((position >= prompts[sequence] - 1) & (position < lengths[sequence] - 1)).nonzero().squeeze(1)
    borrowers = shared.nonzero().squeeze(1)
    predicted_in = torch.cat([sequence[places], borrowers])
    target = torch.cat([position[places] + 1, prompts[borrowers]])
    places = torch.cat([places, (prompt_starts + shared - 1)[borrowers]])
    order = torch.argsort(predicted_in * (int(lengths.max()) + 1) + target)
    places, predicted_in, target = places[order], predicted_in[order], target[order]
    targets = batch.token_ids[batch.offsets[chosen][predicted_in] + target]
    return places, targets, batch.response_offsets[chosen][predicted_in] + target - prompts[predicted_in]
