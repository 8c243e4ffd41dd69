"""Qwen3-Next: three layers with a gated delta net, then one with attention whose output is gated;
experts beside a shared one, which is gated too. A quarter of each head is rotated.

The tensors ``mtp.*`` of a checkpoint, which predict further tokens, are left unread.
"""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    QK_NORM,
    Architecture,
    Family,
    LinearAttention,
    Part,
    Slot,
    common,
    refusal,
    refuse,
)
from megatron_rl.models.qwen3_moe import EXPERT, ROUTER

KINDS = ("linear_attention", "full_attention")
SHARED_EXPERT = tuple(
    Slot(
        f"mlp.shared_experts.{slot.megatron}",
        slot.kind,
        tuple(f"mlp.shared_expert.{name}" for name in slot.hf),
    )
    for slot in EXPERT
)


def linear_attention(hf: Any) -> LinearAttention:
    return LinearAttention(
        layers=tuple(each == "linear_attention" for each in hf.layer_types),
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        kernel=hf.linear_conv_kernel_dim,
    )


def delta_slots(linear: LinearAttention, hidden: int) -> tuple[Slot, ...]:
    """Of the gated delta net. The rows of ``in_proj_qkvz`` and ``in_proj_ba`` come by key head, and
    in it query, key, its values, their gates; and the rates and decays of its values."""
    heads, key = linear.key_heads, linear.key_dim
    group = linear.value_heads // heads  # value heads of a key head
    value, all_keys = group * linear.value_dim, heads * key
    wide = 2 * (key + value)
    inputs = (
        Part("query", 0, 0, key, wide, heads),
        Part("key", 0, key, key, wide, heads),
        Part("value", 0, 2 * key, value, wide, heads),
        Part("z", 0, 2 * key + value, value, wide, heads),
        Part("beta", 1, 0, group, 2 * group, heads),
        Part("alpha", 1, group, group, 2 * group, heads),
    )
    filters = (
        Part("query", 0, 0, key, key, heads),
        Part("key", 0, all_keys, key, key, heads),
        Part("value", 0, 2 * all_keys, value, value, heads),
    )
    sizes = linear.value_heads
    return tuple(
        Slot(f"self_attention.{megatron}", kind, tuple(f"linear_attn.{x}" for x in hf), shape, cut)
        for megatron, kind, hf, shape, cut in (
            (
                "in_proj.weight",
                "parts",
                ("in_proj_qkvz.weight", "in_proj_ba.weight"),
                (heads * wide + 2 * sizes, hidden),
                inputs,
            ),
            (
                "conv1d.weight",
                "parts",
                ("conv1d.weight",),
                (linear.filtered, 1, linear.kernel),
                filters,
            ),
            ("dt_bias", "rows", ("dt_bias",), (sizes,), ()),
            ("A_log", "rows", ("A_log",), (sizes,), ()),
            ("out_norm.weight", "whole", ("norm.weight",), (linear.value_dim,), ()),
            ("out_proj.weight", "columns", ("out_proj.weight",), (hidden, heads * value), ()),
        )
    )


def read(hf: Any) -> Architecture:
    refuse(
        hf,
        {
            "attention_bias": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            "norm_topk_prob": (True,),
        },
    )
    for each in hf.layer_types:
        if each not in KINDS:
            raise ValueError(refusal(hf, "layer_types", hf.layer_types, KINDS))
    linear = linear_attention(hf)
    gate = Slot(
        "mlp.shared_experts.gate_weight",
        "whole",
        ("mlp.shared_expert_gate.weight",),
        (1, hf.hidden_size),
    )
    experts = (*ROUTER, *SHARED_EXPERT, gate)
    return common(
        hf,
        layer_slots=ATTENTION + QK_NORM + experts,
        linear_slots=(ATTENTION[0], *delta_slots(linear, hf.hidden_size), ATTENTION[3], *experts),
        linear=linear,
        qk_norm=True,
        centered_norms=True,
        gated_outputs=True,
        rotary_share=hf.rope_parameters["partial_rotary_factor"],
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_ffn_hidden_size=hf.moe_intermediate_size,
        expert_slots=EXPERT,
        expert_prefix="mlp.experts",
        shared_ffn_hidden_size=hf.shared_expert_intermediate_size,
    )


FAMILY = Family("Qwen3NextForCausalLM", read)
