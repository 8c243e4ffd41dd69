"""Where the elements of HF tensors sit in Megatron parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.models.base import ATTENTION, DENSE_MLP, QKV_BIAS, Architecture
from megatron_rl.models.moe.mixtral import EXPERT, ROUTER
from megatron_rl.models.parameter_map import (
    hf_names,
    hf_shapes,
    layer_parameters,
    local_shape,
    model_parameters,
    padded_vocab,
    part_of,
    shards,
    tensor_slices,
)
from megatron_rl.types import Shard


def architecture(**more: Any) -> Architecture:
    fields: dict[str, Any] = dict(
        family="test",
        num_layers=2,
        hidden_size=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=3,
        ffn_hidden_size=8,
        vocab_size=10,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_type="default",
        tied_embeddings=False,
        max_positions=64,
        layer_slots=ATTENTION + QKV_BIAS + DENSE_MLP,
    )
    return Architecture(**(fields | more))


def by_name(arch: Architecture, megatron: str) -> Any:
    return next(p for p in model_parameters(arch) if p.slot.megatron == megatron)


def held_by(megatron: str, rank: int, size: int) -> list[Shard]:
    """Of one parameter of ``architecture()``, by one of ``size`` tensor ranks."""
    arch = architecture()
    return shards(by_name(arch, megatron), arch, 10, rank=rank, size=size)


def test_queries_keys_and_values_of_a_group_stand_together() -> None:
    # 2 groups of 2 query heads of 3 rows: whole parameter = q 0-5, k 0-2, v 0-2, q 6-11, k 3-5, v
    # 3-5; the second rank has the latter.
    held = held_by("self_attention.linear_qkv.weight", rank=1, size=2)
    q, k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    assert held == [
        Shard(q, (12, 6), (6, 0), (6, 6), 0, (6, 1)),
        Shard(k, (6, 6), (3, 0), (3, 6), 36, (6, 1)),
        Shard(v, (6, 6), (3, 0), (3, 6), 54, (6, 1)),
    ]
    rows = torch.arange(72).view(12, 6)
    assert torch.equal(part_of(rows, held[2]), rows[9:])


def test_more_ranks_than_groups_cut_a_group() -> None:
    # 24 rows over 4 ranks: rank 1 has rows 6..11, which are keys and values of group 0.
    held = held_by("self_attention.linear_qkv.bias", rank=1, size=4)
    names = [(shard.name.split(".")[-2], shard.start, shard.shape, shard.offset) for shard in held]
    assert names == [("k_proj", (0,), (3,), 0), ("v_proj", (0,), (3,), 3)]


def test_each_rank_has_its_gate_rows_then_its_up_rows() -> None:
    held = held_by("mlp.linear_fc1.weight", rank=1, size=2)
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert held == [
        Shard(gate, (8, 6), (4, 0), (4, 6), 0, (6, 1)),
        Shard(up, (8, 6), (4, 0), (4, 6), 24, (6, 1)),
    ]


def test_row_parallel_weights_are_cut_along_the_columns() -> None:
    held = held_by("mlp.linear_fc2.weight", rank=1, size=2)
    assert held == [Shard("model.layers.0.mlp.down_proj.weight", (6, 8), (0, 4), (6, 4), 0, (4, 1))]


def test_the_last_rank_holds_the_padding_of_the_vocabulary() -> None:
    arch = architecture()
    assert padded_vocab(10, divisible_by=4, tensor=2) == 16
    embedding = by_name(arch, "embedding.word_embeddings.weight")
    assert local_shape(embedding, arch, 16, 2) == (8, 6)
    assert shards(embedding, arch, 16, rank=1, size=2) == [
        Shard("model.embed_tokens.weight", (10, 6), (8, 0), (2, 6), 0, (6, 1))
    ]


def test_a_tied_head_is_no_tensor_of_its_own() -> None:
    assert "lm_head.weight" in hf_names(architecture())
    assert "lm_head.weight" not in hf_names(architecture(tied_embeddings=True))


def test_hf_shapes_are_those_of_the_checkpoint() -> None:
    arch = architecture()
    shapes = {
        name: shape for p in layer_parameters(arch, 0) for name, shape in hf_shapes(p, arch).items()
    }
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (12, 6)
    assert shapes["model.layers.0.self_attn.v_proj.bias"] == (6,)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (6, 12)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (8, 6)


@settings(max_examples=40)
@given(
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 3),
    tensor=st.sampled_from([1, 2, 4]),
    vocab=st.integers(5, 40),
    moe=st.booleans(),
)
def test_every_element_is_held_exactly_once(
    groups: int, per_group: int, tensor: int, vocab: int, moe: bool
) -> None:
    """Writing each HF element's own number into the shards of all ranks fills every parameter, and
    reads every element once."""
    more: dict[str, Any] = dict(
        num_heads=groups * per_group * 4, num_kv_heads=groups, head_dim=4, vocab_size=vocab
    )
    if moe:
        more |= dict(
            num_experts=2,
            expert_ffn_hidden_size=4,
            expert_slots=EXPERT,
            expert_prefix="experts",
            layer_slots=ATTENTION + ROUTER,
        )
    arch = architecture(**more)
    rows = padded_vocab(vocab, 4, tensor)
    for parameter in model_parameters(arch):
        whole = {
            name: torch.zeros(shape, dtype=torch.int)
            for name, shape in hf_shapes(parameter, arch).items()
        }
        size = 1 if parameter.slot.kind == "whole" else tensor
        for rank in range(size):
            local = torch.zeros(local_shape(parameter, arch, rows, size), dtype=torch.int)
            for shard in shards(parameter, arch, rows, rank, size):
                assert shard.full == tuple(whole[shard.name].shape)
                whole[shard.name][tensor_slices(shard)] += 1
                part_of(local, shard).add_(1)
            assert local.max() <= 1
            filled = int(local.sum())
            if parameter.slot.kind == "vocab":
                assert (
                    filled
                    == min(max(vocab - rank * rows // size, 0), rows // size) * arch.hidden_size
                )
            else:
                assert filled == math.prod(local.shape)
        assert all(bool((count == 1).all()) for count in whole.values())


def test_sizes_that_do_not_divide_are_an_assertion() -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        local_shape(by_name(architecture(), "mlp.linear_fc2.weight"), architecture(), 10, 3)
