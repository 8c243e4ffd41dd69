"""Attention and normalisation of the specification that needs no Transformer Engine.

Core attention is torch's scaled_dot_product_attention over packed sequences. Under context parallelism every sequence is cut
into ``2 * ranks`` chunks and rank r holds chunks r and ``2 * ranks - 1 - r``, so that causal work is balanced; keys and values
are gathered over the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark by which megatron sums its gradient over the tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass
class Packing(PackedSeqParams):
    """Boundaries of the packed sequences, also as plain numbers (``lengths``, padding included, over all context ranks)."""

    lengths: list[int] = field(default_factory=list)


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
        lengths, ranks = packed_seq_params.lengths, self.context_group.size()
        if ranks == 1:
            out = self._sequences(query, key, value, lengths)
        else:
            out = self._context_parallel(query, key, value, lengths, ranks)
        return out.reshape(out.shape[0], -1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out.squeeze(0).transpose(0, 1)

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._sdpa(q, k, v, None) for q, k, v in parts])

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
            outputs.append(self._sdpa(q, k.flatten(0, 1), v.flatten(0, 1), mask))
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
