"""What some families have otherwise: sizes, and lines of a Megatron rank, by hand. See
``training_tables``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from megatron_rl.models.base import LinearAttention
from tools.planning.engine_tables import ModelShape
from tools.planning.shard_table import ShardTable


def expert_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    if family in ("mixtral", "gpt_oss"):
        return {
            "experts": config["num_local_experts"],
            "moe_ffn": config["intermediate_size"],
            "expert_names": "mixtral" if family == "mixtral" else "qwen",
        }
    if family in ("glm4_moe", "deepseek_v3"):
        return {
            "experts": config["n_routed_experts"],
            "moe_ffn": config["moe_intermediate_size"],
            "shared_ffn": config["n_shared_experts"] * config["moe_intermediate_size"],
            "router_bias": True,
            "dense_layers": tuple(range(config["first_k_dense_replace"])),
        }
    if not family.removesuffix("_text").endswith(("_moe", "next")):
        return {}
    step = config.get("decoder_sparse_step") or 1
    without_experts = config.get("mlp_only_layers") or ()
    dense_layers = tuple(
        layer
        for layer in range(config["num_hidden_layers"])
        if layer in without_experts or (layer + 1) % step
    )
    # "num_local_experts" is the name since transformers 5.
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return {
        "experts": experts,
        "moe_ffn": config["moe_intermediate_size"],
        "shared_ffn": config.get("shared_expert_intermediate_size", 0),
        "dense_layers": dense_layers,
    }


def linear_sizes(config: Mapping[str, Any]) -> LinearAttention:
    return LinearAttention(
        layers=tuple(each == "linear_attention" for each in config["layer_types"]),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        fused=config["model_type"] == "qwen3_next",
    )


def linear_attention(
    lines: ShardTable, model: ModelShape, linear: LinearAttention, tp: int, rank: int
) -> None:
    """A rank has whole key heads, of which HF keeps q, k, v, z and b, a together; here all q
    come first, then all k, and so on. Qwen3.5 has four matrices, of which the first has all q, all
    k, all v."""
    key = "self_attention.in_proj.weight"
    heads = linear.key_heads // tp
    group = linear.value_heads // linear.key_heads
    first, at, k, v = rank * heads, 0, linear.key_dim, group * linear.value_dim
    queries, fused = linear.key_heads * k, linear.fused
    matrices = (
        ("qkvz", 2 * (k + v), ((0, k), (k, k), (2 * k, v), (2 * k + v, v))),
        ("ba", 2 * group, ((0, group), (group, group))),
    )
    if not fused:
        kinds = ((0, k), (queries, k), (2 * queries, v))
        matrices = (
            ("qkv", 2 * k + v, kinds),
            *((name, rows, ((0, rows),)) for name, rows in (("z", v), ("b", group), ("a", group))),
        )
    for name, of_head, pieces in matrices:
        full, tensor = (
            (linear.key_heads * of_head, model.hidden),
            f"linear_attn.in_proj_{name}.weight",
        )
        for (start, rows), head in product(pieces, range(first, first + heads)):
            lines.rows(tensor, full, head * (of_head if fused else rows) + start, rows, key, at)
            at += rows
    at, full = 0, (linear.filtered, 1, linear.kernel)
    for start, rows in ((0, k), (linear.key_heads * k, k), (2 * linear.key_heads * k, v)):
        for head in range(first, first + heads):
            begin, name = start + head * rows, "conv1d.weight"
            lines.rows(f"linear_attn.{name}", full, begin, rows, f"self_attention.{name}", at)
            at += rows
    count, all_heads = heads * group, linear.value_heads
    for name in ("dt_bias", "A_log"):
        key = f"self_attention.{name}"
        lines.rows(f"linear_attn.{name}", (all_heads,), first * group, count, key)
    key = "self_attention.out_norm.weight"
    lines.whole("linear_attn.norm.weight", (linear.value_dim,), key)
    full, part, name = (model.hidden, linear.key_heads * v), heads * v, "out_proj.weight"
    lines.columns(f"linear_attn.{name}", full, first * v, part, f"self_attention.{name}")


def gated_query_key_value(lines: ShardTable, model: ModelShape, tp: int, rank: int) -> None:
    """Each query group: its queries, their gates, its key, its value."""
    dim, at = model.head_dim, 0
    heads, groups = model.heads // model.kv_heads, model.kv_heads // tp
    for group in range(rank * groups, (rank + 1) * groups):
        queries = [2 * (group * heads + h) + gate for gate in (0, 1) for h in range(heads)]
        rows = [("q", 2 * model.heads, each) for each in queries]
        for letter, all_rows, row in (
            *rows,
            ("k", model.kv_heads, group),
            ("v", model.kv_heads, group),
        ):
            name, full = f"self_attn.{letter}_proj.weight", (all_rows * dim, model.hidden)
            lines.rows(name, full, row * dim, dim, "self_attention.linear_qkv.weight", at)
            at += dim


def heads_norms(lines: ShardTable, model: ModelShape, tp: int, here: int) -> None:
    """Norms over all heads of queries and of keys: a tensor rank has the weights of its heads."""
    for letter, heads in (("q", model.heads), ("k", model.kv_heads)):
        size, part = heads * model.head_dim, heads * model.head_dim // tp
        key = f"self_attention.{letter}_norm.weight"
        lines.rows(f"self_attn.{letter}_norm.weight", (size,), here * part, part, key)
