"""megatron's self-attention with what some families do differently: a second rotary base, a norm
over all heads."""

from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor


class TwoBasesAttention(SelfAttention):
    """For a model whose layers with windows have plain angles, with a base of their own.

    The angles of a token are those of the full layers, then those of layers with windows, and both
    once more: megatron repeats the frequencies that it is given. ``window_scale``: factor of the
    scores in layers with windows.
    """

    def __init__(self, config: Any, *arguments: Any, window_scale: float, **rest: Any) -> None:
        size, layers = config.window_size, config.window_attn_skip_freq
        self.has_window = is_layer_window_attention(size, layers, rest["layer_number"])
        if self.has_window:
            config = copy(config)
            config.softmax_scale = window_scale
        super().__init__(config, *arguments, **rest)

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor, **rest: Any) -> Any:
        angles = rotary_pos_emb.unflatten(-1, (2, 2, -1))[..., int(self.has_window), :]
        return super().forward(*arguments, rotary_pos_emb=angles.flatten(-2), **rest)


class HeadsNorm(torch.nn.Module):
    """RMSNorm over all heads of a token's queries or keys, ``[..., heads of this rank, numbers]``:
    the sum of squares is that of all tensor ranks, the weight that of this rank's heads."""

    def __init__(self, config: Any, heads: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.eps = config.layernorm_epsilon
        self.size = heads * config.kv_channels
        weight = torch.empty(self.size // group.size(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.flatten(-2).float()
        squares = numbers.square().sum(-1, keepdim=True)
        # Summed over ranks forward and backward: each rank's result depends on the sum.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = numbers * torch.rsqrt(squares / self.size + self.eps) * self.weight
        return normed.type_as(x).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """megatron's description of the weight for checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class NormedHeadsAttention(SelfAttention):
    """With ``HeadsNorm`` on queries and keys. megatron sums the gradients of q_layernorm and
    k_layernorm over tensor ranks, which would be wrong here: these norms have other names."""

    def __init__(self, config: Any, *arguments: Any, **rest: Any) -> None:
        super().__init__(config, *arguments, **rest)
        group = self.pg_collection.tp
        self.q_norm = HeadsNorm(config, config.num_attention_heads, group)
        self.k_norm = HeadsNorm(config, config.num_query_groups, group)

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
        query, key, *others = super().get_query_key_value_tensors(*arguments, **options)
        return self.q_norm(query), self.k_norm(key), *others


class NormedTwoBasesAttention(NormedHeadsAttention, TwoBasesAttention):
    """Both of them (OLMo 3)."""
