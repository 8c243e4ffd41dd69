"""Attention and norm of the layers that need no Transformer Engine.

Core attention is torch's scaled_dot_product_attention over packed sequences. Under context
parallelism every sequence is cut into ``2 * ranks`` chunks, of which rank r holds number r and
number ``2 * ranks - 1 - r``: so causal work is balanced. Keys and values are gathered over ranks.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.policy.passes.biased_experts import with_sinks
from megatron_rl.policy.passes.vision import PlacedImages
from megatron_rl.runtime.device import to_device

# Sequences up to this length are never worth a call of their own.
SHORT = 64


class _RootMeanSquareNorm(torch.autograd.Function):
    """``weight * y`` with ``y = x / r``, ``r = sqrt(mean(x * x) + eps)``, over the last dimension.

    On a CPU torch composes it of one operation for each sign in that formula, forward and backward;
    this takes 0.4 to 0.6 of the time. With g, the gradient of the result::

        of x: (weight * g - y * mean(weight * g * y)) / r        of weight: sum of g * y
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, weight, inverse = ctx.saved_tensors
        y = x * inverse
        products = (gradient * y).reshape(-1, x.shape[-1])
        mean = products.mv(weight).view_as(inverse).div_(x.shape[-1])
        of_x = (gradient * weight).sub_(y.mul_(mean)).mul_(inverse)
        return of_x, products.sum(0), None


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient megatron sums over tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.is_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x, self.weight)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """``forward`` with this weight."""
        weight = 1 + weight.float() if self.is_centered else weight
        if not x.is_cuda and x.dtype == torch.float32:
            return _RootMeanSquareNorm.apply(x, weight, self.eps)
        if self.is_centered:  # products in float32, too
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)
        return F.rms_norm(x, weight.shape, weight, self.eps)  # a fused kernel; sums in float32


class NormedAdd(torch.nn.Module):
    """Replaces megatron's residual addition: the output of a part of a layer is normed first."""

    def __init__(self, norm: Any, config: Any) -> None:
        super().__init__()
        size = dict(hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.norm = norm(config=config, **size)

    def forward(self, *_: Any) -> Any:
        return lambda output, residual, dropout: residual + self.norm(output[0])


@dataclass(frozen=True)
class AttentionCall:
    """``count`` sequences of similar length that share one call of attention.

    Attributes:
        tokens: places among the packed tokens, ``length`` for each sequence; the unused end of a
            shorter one repeats its last token, and results there are dropped.
        queries: None: the tokens. Else the places of those that have a result, as many for each
            sequence: a short response behind a borrowed prompt leaves out the prompt's.
        mask: with ``queries`` alone; which tokens each of them sees.
    """

    tokens: Tensor
    count: int
    length: int
    queries: Tensor | None = None
    mask: Bool[Tensor, "count 1 queries length"] | None = None

    def within(self, window: int | None) -> Tensor | None:
        """``mask`` without the tokens before the last ``window`` that a query sees, itself
        included; None: each sees all up to itself."""
        if window is None or self.length <= window:
            return self.mask
        device = self.tokens.device
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        column = torch.arange(self.length, device=device)
        return mask & (column >= mask.sum(-1, keepdim=True) - window)


def positions(boundaries: Tensor, num_tokens: int) -> Tensor:
    """Positions of packed tokens in their sequences: 0, 1, 0, 1, 2 for boundaries 0, 2, 5."""
    tokens = torch.arange(num_tokens, device=boundaries.device)
    return tokens - boundaries[torch.bucketize(tokens, boundaries[1:], right=True)]


@dataclass
class Packing(PackedSeqParams):
    """The packed sequences as attention takes them.

    ``lengths``: padding included, over all context ranks. Where sequences share a prompt:
    ``shared`` and ``owner`` as in ``group``, and ``positions``, those of the packed tokens in their
    sequences, which do not follow from the boundaries then. Of a vision-language model:
    ``rope_positions`` (time, row, column) of the packed tokens of all context ranks, and ``images``
    of this rank's tokens, where they are encoded.
    """

    lengths: Tensor | None = None
    shared: Tensor | None = None
    owner: Tensor | None = None
    positions: Tensor | None = None
    rope_positions: Tensor | None = None  # [3, 1, tokens]
    images: PlacedImages | None = None
    window_masks: dict[int | None, list[Tensor | None]] = field(default_factory=dict)

    @cached_property
    def all_positions(self) -> Tensor:
        """Positions of the packed tokens in their sequences, where one context rank has them all;
        found on the device."""
        if self.positions is not None:
            return self.positions
        boundaries, lengths = self.cu_seqlens_q, self.lengths
        assert boundaries is not None and lengths is not None
        return positions(boundaries, int(lengths.sum()))

    @cached_property
    def groups(self) -> tuple[list[AttentionCall], Tensor]:
        """``group`` of this packing, on the device of its boundaries.

        Computed for the first layer that needs them: attention of Transformer Engine never does.
        """
        shared = torch.zeros_like(self.lengths) if self.shared is None else self.shared
        owner = torch.arange(len(self.lengths)) if self.owner is None else self.owner
        return group(self.lengths, shared, owner, self.cu_seqlens_q.device)

    def masks(self, window: int | None) -> list[Tensor | None]:
        """Masks of the groups, made for the first layer with this ``window``: see ``within``."""
        if window not in self.window_masks:
            self.window_masks[window] = [call.within(window) for call in self.groups[0]]
        return self.window_masks[window]


def group(
    own: Tensor, shared: Tensor, owner: Tensor, device: torch.device
) -> tuple[list[AttentionCall], Tensor]:
    """The groups of packed sequences, and ``restore``: where each packed token's result is.

    Sequence i packs ``own[i]`` tokens; before them it has the first ``shared[i]`` tokens of
    sequence ``owner[i]`` (a prompt; 0 for a sequence that packs its prompt itself).
    ``restore[t]`` counts over the results of all groups.

    Groups go by falling length. One takes sequences of at least half its longest; from SHORT on it
    takes all, for there a call costs more than the padding. On a CPU sequences that borrow at least
    as many tokens as they pack come last, in groups of their own, whose queries are their packed
    tokens: fewer products, although causal attention could leave out half of those of a square.
    """
    lengths = own + shared
    # On a GPU a mask would take the place of the flash kernel.
    is_short = (shared > 0) & (own <= shared) & (device.type == "cpu")
    keys = lengths - is_short * (int(lengths.max()) + 1)
    order = torch.argsort(keys, descending=True, stable=True)
    starts = torch.nn.functional.pad(own.cumsum(0), (1, 0))
    sizes = lengths[order].tolist()
    num_whole = len(sizes) - int(is_short.sum())
    groups: list[AttentionCall] = []
    restore = torch.empty(int(starts[-1]), dtype=torch.long)
    first = 0  # of the group, in ``order``
    offset = 0  # of its results, among those of all groups
    while first < len(sizes):
        longest = sizes[first]
        end = num_whole if first < num_whole else len(sizes)
        last = first
        while last < end and (longest <= SHORT or 2 * sizes[last] >= longest):
            last += 1
        rows = order[first:last]
        column = torch.arange(longest)[None]
        position = torch.minimum(column, lengths[rows, None] - 1)
        # Token p of a sequence: in its owner's prompt, or, after the prompt, among its own tokens,
        # the first of which has position ``shared``.
        is_borrowed = position < shared[rows, None]
        own_starts = (starts[:-1] - shared)[rows, None]
        tokens = position + torch.where(is_borrowed, starts[owner[rows], None], own_starts)
        queries = tokens
        # The result of a shared token is taken from the sequence that packs it.
        is_kept = ~is_borrowed & (column < lengths[rows, None])
        call = AttentionCall(to_device(tokens.flatten(), device), len(rows), longest)
        if first >= num_whole:
            column = torch.arange(int(own[rows].max()))[None]
            is_kept = column < own[rows, None]
            position = shared[rows, None] + torch.minimum(column, own[rows, None] - 1)
            queries = position + own_starts
            mask = to_device(torch.arange(longest) <= position[:, None, :, None], device)
            call = replace(call, queries=to_device(queries.flatten(), device), mask=mask)
        place = torch.arange(queries.numel()).view(queries.shape)
        restore[queries[is_kept]] = offset + place[is_kept]
        groups.append(call)
        offset += queries.numel()
        first = last
    return groups, to_device(restore, device)


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence.

    Query, key and value are ``[tokens, heads, head_dim]``. In a layer with a ``window`` a query
    sees that many tokens, itself included; None: all before it. With sinks the softmax of a head
    has one more term in its denominator, ``exp(sink)``.
    """

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
        assert dropout == 0.0, (
            f"attention dropout is {dropout}; logprobs of two passes would differ"
        )
        given = pg_collection is not None
        self.context_group = (
            pg_collection.cp if given else parallel_state.get_context_parallel_group()
        )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        size, layers = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(size, layers, layer_number)
        self.window: int | None = size[0] + 1 if has_window else None
        self.softmax_offset = None  # megatron's name of the sinks
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )

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
        if self.context_group.size() == 1:
            out = self._sequences(query, key, value, packed_seq_params)
        else:
            out = self._context_parallel(query, key, value, packed_seq_params.lengths.tolist())
        return out.reshape(out.shape[0], -1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``[sequences, tokens, heads, head_dim]`` in and out."""
        tokens, size = query.shape[1], query.shape[-1]
        if self.softmax_offset is not None:
            of_heads = (query, key, value, mask)
            query, key, value, mask = with_sinks(self.softmax_offset, self.scale, *of_heads)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        settings = dict(is_causal=mask is None, scale=self.scale, enable_gqa=grouped)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)
        return out.transpose(1, 2)[:, -tokens:, :, :size]

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        groups, restore = packing.groups
        outputs = []
        for call, mask in zip(groups, packing.masks(self.window), strict=True):
            queries = call.tokens if call.queries is None else call.queries
            taken = ((query, queries), (key, call.tokens), (value, call.tokens))
            rows = (x.index_select(0, at).unflatten(0, (call.count, -1)) for x, at in taken)
            outputs.append(self._sdpa(*rows, mask).flatten(0, 1))
        return torch.cat(outputs).index_select(0, restore)

    def _context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
    ) -> Tensor:
        """Sequence by sequence: this rank's queries against the keys and values of all ranks."""
        ranks = self.context_group.size()
        local = [length // ranks for length in lengths]
        # The backward of the gather sums the gradients of all ranks' queries and keeps this rank's
        # part.
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1),
            tensor_parallel_output_grad=True,
            group=self.context_group,
        )
        by_rank = both.view(ranks, -1, *both.shape[1:])
        keys, values = by_rank.split([key.shape[-1], value.shape[-1]], dim=-1)
        parts = (query.split(local), keys.split(local, dim=1), values.split(local, dim=1))
        outputs = []
        for length, q, k, v in zip(lengths, *parts, strict=True):
            # Keys come rank by rank, not in the order of the sequence: hence a mask of positions.
            positions = [zigzag(length, rank, ranks, q.device) for rank in range(ranks)]
            own_positions = positions[self.context_group.rank()]
            distance = own_positions[:, None] - torch.cat(positions)[None]
            mask = distance >= 0
            if self.window is not None:
                mask &= distance < self.window
            out = self._sdpa(q[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None], mask)
            outputs.append(out.squeeze(0))
        return torch.cat(outputs)


def zigzag(length: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions that context rank ``rank`` holds of a sequence.

    ``length`` is a multiple of ``2 * ranks``.

    Example: ``zigzag(8, 1, 2)`` is ``[2, 3, 4, 5]``; rank 0 holds ``[0, 1, 6, 7]``.
    """
    if ranks == 1:
        return torch.arange(length, device=device)
    chunk = length // (2 * ranks)
    first = torch.arange(rank * chunk, (rank + 1) * chunk, device=device)
    second = torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk, device=device)
    return torch.cat([first, second])
