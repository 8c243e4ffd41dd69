"""One micro-batch as this rank sees it: sequences packed end to end, cut over context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from megatron_rl.policy.attention import Packing, group
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

    ``rows[i]`` is a place among the t tokens, ``targets[i]`` the token that follows it, ``index[i]`` that token's place in the
    response-token layout of the batch. An empty micro-batch holds one dummy sequence and no rows.
    """

    token_ids: Int[Tensor, "1 t"]
    position_ids: Int[Tensor, "1 t"]
    packing: Packing
    rows: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    index: Int[Tensor, " n"]
    empty: bool


DUMMY = SequenceBatch(torch.zeros(2, dtype=torch.long), torch.tensor([1]), torch.tensor([1]))


def padded_lengths(batch: SequenceBatch, rows: Sequence[int], rule: Multiples, at_least: int = 0) -> Int[Tensor, " sequences"]:
    """Tokens each sequence takes in the packed micro-batch of ``rows`` (none: the dummy sequence), over all context ranks; the
    last one is stretched to a total that fits ``rule`` and is no less than ``at_least``."""
    lengths = batch.lengths[torch.tensor(list(rows))] if rows else DUMMY.lengths
    padded = (lengths + rule.sequence - 1) // rule.sequence * rule.sequence
    total = max(int(padded.sum()), at_least)
    padded[-1] += -(-total // rule.total) * rule.total - int(padded.sum())
    return padded


def pack(
    batch: SequenceBatch, rows: Sequence[int], rule: Multiples, context_rank: int, context: int, device: torch.device, at_least: int = 0
) -> Microbatch:
    """The micro-batch of sequences ``rows`` of ``batch`` on context rank ``context_rank`` of ``context``, of ``at_least`` so many
    tokens over all context ranks.

    Raises ValueError for a row without prompt (its first response token has nothing to be predicted from) or response.
    """
    padded = padded_lengths(batch, rows, rule, at_least)
    if not rows:
        batch = DUMMY
    chosen = torch.tensor(list(rows) or [0])
    prompts, responses = batch.prompt_lengths[chosen], batch.response_lengths[chosen]
    short = chosen[(prompts < 1) | (responses < 1)]
    if len(short):
        raise ValueError(f"packing: row {int(short[0])} has an empty prompt or response; every sequence needs at least one token of each")
    lengths = prompts + responses
    # Everything below is over the padded tokens of all context ranks, then cut to this rank.
    owner = torch.repeat_interleave(torch.arange(len(chosen)), padded)
    starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    position = torch.arange(len(owner)) - starts[owner]
    if context > 1:
        chunk = position // (padded // (2 * context))[owner]
        mine = (chunk == context_rank) | (chunk == 2 * context - 1 - context_rank)
        owner, position = owner[mine], position[mine]
    length, prompt = lengths[owner], prompts[owner]
    source = batch.offsets[chosen][owner] + position
    last = batch.token_ids.numel() - 1
    token_ids = torch.where(position < length, batch.token_ids[source.clamp(max=last)], 0)
    predicts = (position >= prompt - 1) & (position < length - 1)
    if not rows:
        predicts = torch.zeros_like(predicts)
    found = predicts.nonzero().squeeze(1)
    index = batch.response_offsets[chosen][owner] + position - (prompt - 1)
    longest = int(padded.max())
    boundaries = starts.to(torch.int32).to(device)
    groups, restore = group(padded, device) if context == 1 else ([], None)
    packing = Packing(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest,
        lengths=padded.tolist(), groups=groups, restore=restore,
    )  # fmt: skip
    return Microbatch(
        token_ids=token_ids[None].to(device),
        position_ids=position[None].to(device),
        packing=packing,
        rows=found.to(device),
        targets=batch.token_ids[(source[found] + 1)].to(device),
        index=index[found].to(device),
        empty=not rows,
    )
