"""What this rank's Megatron parameters hold of the HF tensors, for a planned weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.policy.state.weights import LocalParameter
from megatron_rl.types import Shard


def key(item: LocalParameter) -> str:
    """``<chunk>:<name of the parameter in the chunk>``."""
    return f"{item.chunk}:{item.name}"


def parameter_shards(held: Sequence[LocalParameter]) -> list[Shard]:
    """The shards of all parameters. The head of a tied model, where a stage has a copy of it, holds
    the embedding; padding of the vocabulary is in no shard.

    Example: tensor rank 1 of 2, hidden size 4, one head of dimension 2 a rank: the key rows of
    ``linear_qkv`` are ``Shard("model.layers.0.self_attn.k_proj.weight", (4, 4), (2, 0), (2, 4), 8,
    (4, 1), "0:decoder.layers.0.self_attention.linear_qkv.weight", "float32")``.
    """
    shards = []
    for item in held:
        dtype = str(item.tensor.dtype).removeprefix("torch.")
        shards += [replace(shard, key=key(item), dtype=dtype) for shard in item.shards]
    return shards
