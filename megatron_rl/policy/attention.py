"""Attention and normalisation of the specification that needs no Transformer Engine.

Core attention is torch's scaled_dot_product_attention over packed sequences. Under context parallelism every sequence is cut
into ``2 * ranks`` chunks and rank r holds chunks r and ``2 * ranks - 1 - r``, so that causal work is balanced; keys and values
are gathered over the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.runtime.transfer import to_device

# Sequences up to this length are never worth a call of their own.
SHORT = 64


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark by which megatron sums its gradient over the tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that are attended to together: ``tokens[i]`` is a place among the packed tokens, rows of ``length``
    for each of ``count`` sequences; a row's unused end repeats its last token, and its results are dropped."""

    tokens: Tensor
    count: int
    length: int


@dataclass
class Packing(PackedSeqParams):
    """The packed sequences as attention wants them: ``lengths`` (padding included, over all context ranks), and, where sequences
    share a prompt, ``shared`` and ``owner`` as ``group`` takes them, and the ``positions`` of the packed tokens in their sequences,
    which boundaries cannot tell then."""

    lengths: Tensor | None = None
    shared: Tensor | None = None
    owner: Tensor | None = None
    positions: Tensor | None = None

    @cached_property
    def groups(self) -> tuple[list[Group], Tensor]:
        """``group`` of this packing, on the device of its boundaries; made when the first layer asks (attention of Transformer
        Engine does not)."""
        shared = torch.zeros_like(self.lengths) if self.shared is None else self.shared
        owner = torch.arange(len(self.lengths)) if self.owner is None else self.owner
        return group(self.lengths, shared, owner, self.cu_seqlens_q.device)


def group(own: Tensor, shared: Tensor, owner: Tensor, device: torch.device) -> tuple[list[Group], Tensor]:
    """``(groups, restore)`` for packed sequences: by falling length; a group takes sequences of at least half its longest, or all
    from SHORT on, where the number of calls costs more than the padding.

    Sequence i packs ``own[i]`` tokens; before them it has the first ``shared[i]`` tokens of sequence ``owner[i]`` (a prompt; 0 for a
    sequence that packs its prompt itself)."""
    lengths = own + shared
    order = torch.argsort(lengths, descending=True, stable=True)
    starts = torch.nn.functional.pad(own.cumsum(0), (1, 0))
    sizes = lengths[order].tolist()
    groups: list[Group] = []
    restore = torch.empty(int(starts[-1]), dtype=torch.long)
    first = offset = 0
    while first < len(sizes):
        longest = sizes[first]
        last = first
        while last < len(sizes) and (longest <= SHORT or 2 * sizes[last] >= longest):
            last += 1
        rows = order[first:last]
        position = torch.minimum(torch.arange(longest)[None], lengths[rows, None] - 1)
        borrowed = position < shared[rows, None]
        tokens = position + torch.where(borrowed, starts[owner[rows], None], (starts[:-1] - shared)[rows, None])
        # The result of a shared token is taken from the sequence that packs it.
        mine = ~borrowed & (torch.arange(longest)[None] < lengths[rows, None])
        restore[tokens[mine]] = offset + torch.arange(tokens.numel()).view(tokens.shape)[mine]
        groups.append(Group(to_device(tokens.flatten(), device), len(rows), longest))
        offset += tokens.numel()
        first = last
    return groups, to_device(restore, device)


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence; query, key and value are ``[tokens, heads, head_dim]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, f"attention dropout is {dropout}; logprobs of two passes would differ"
        self.context_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, Packing), "this attention takes packed sequences"
        ranks = self.context_group.size()
        if ranks == 1:
            out = self._sequences(query, key, value, packed_seq_params)
        else:
            out = self._context_parallel(query, key, value, packed_seq_params.lengths.tolist(), ranks)
        return out.reshape(out.shape[0], -1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``[sequences, tokens, heads, head_dim]`` in and out."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        groups, restore = packing.groups
        outputs = []
        for part in groups:
            rows = (x.index_select(0, part.tokens).unflatten(0, (part.count, part.length)) for x in (query, key, value))
            outputs.append(self._sdpa(*rows, None).flatten(0, 1))
        return torch.cat(outputs).index_select(0, restore)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], ranks: int) -> Tensor:
        local = [length // ranks for length in lengths]
        # The backward of the gather sums the gradients of all ranks' queries and keeps this rank's part.
        both = torch.cat([key, value], dim=-1)
        both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.context_group)
        keys, values = both.view(ranks, -1, *both.shape[1:]).split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = []
        parts = zip(query.split(local), keys.split(local, dim=1), values.split(local, dim=1), strict=True)
        for length, (q, k, v) in zip(lengths, parts, strict=True):
            positions = torch.cat([zigzag(length, rank, ranks, q.device) for rank in range(ranks)])
            mine = zigzag(length, self.context_group.rank(), ranks, q.device)
            mask = mine[:, None] >= positions[None]
            outputs.append(self._sdpa(q[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None], mask).squeeze(0))
        return torch.cat(outputs)


def zigzag(length: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of a sequence of ``length`` tokens (a multiple of ``2 * ranks``) that context rank ``rank`` holds, in order.

    Example: ``zigzag(8, 1, 2)`` is ``[2, 3, 4, 5]``; rank 0 holds ``[0, 1, 6, 7]``.
    """
    if ranks == 1:
        return torch.arange(length, device=device)
    chunk = length // (2 * ranks)
    first = torch.arange(rank * chunk, (rank + 1) * chunk, device=device)
    second = torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk, device=device)
    return torch.cat([first, second])
