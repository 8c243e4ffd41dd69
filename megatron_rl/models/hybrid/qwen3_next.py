"""Qwen3-Next: three layers with a gated delta net, then one with attention whose output is gated;
experts beside a shared one, which is gated too. A quarter of each head is rotated.

The tensors ``mtp.*`` of a checkpoint, which predict further tokens, are left unread.
"""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    Architecture,
    Family,
    Kind,
    LinearAttention,
    Part,
    Slot,
    common,
    refusal,
    refuse,
)
from megatron_rl.models.qwen3_moe import OPTIONS, ROUTER, experts, shared_expert

KINDS = ("linear_attention", "full_attention")


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

    def slot(name: str, kind: Kind, shape: tuple[int, ...], *hf: str, parts: Any = ()) -> Slot:
        names = tuple(f"linear_attn.{one}" for one in hf or (name,))
        return Slot(f"self_attention.{name}", kind, names, shape, parts)

    matrices = ("in_proj_qkvz.weight", "in_proj_ba.weight")
    return (
        slot(
            "in_proj.weight", "parts", (heads * (wide + 2 * group), hidden), *matrices, parts=inputs
        ),
        slot("conv1d.weight", "parts", (linear.filtered, 1, linear.kernel), parts=filters),
        slot("dt_bias", "rows", (linear.value_heads,)),
        slot("A_log", "rows", (linear.value_heads,)),
        slot("out_norm.weight", "whole", (linear.value_dim,), "norm.weight"),
        slot("out_proj.weight", "columns", (hidden, heads * value)),
    )


def read(hf: Any) -> Architecture:
    refuse(hf, OPTIONS)
    for each in hf.layer_types:
        if each not in KINDS:
            raise ValueError(refusal(hf, "layer_types", hf.layer_types, KINDS))
    linear = LinearAttention(
        layers=tuple(each == "linear_attention" for each in hf.layer_types),
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        kernel=hf.linear_conv_kernel_dim,
    )
    name, shape = "mlp.shared_expert_gate.weight", (1, hf.hidden_size)
    gate = Slot("mlp.shared_experts.gate_weight", "whole", (name,), shape)
    both = (*shared_expert("mlp.shared_expert"), gate)
    return common(
        hf,
        **experts(hf, both),
        linear_slots=(
            *(ATTENTION[0], *delta_slots(linear, hf.hidden_size), ATTENTION[3]),
            *(*ROUTER, *both),
        ),
        linear=linear,
        qk_norm=True,
        centered_norms=True,
        gated_outputs=True,
        rotary_share=hf.rope_parameters["partial_rotary_factor"],
        shared_ffn_hidden_size=hf.shared_expert_intermediate_size,
    )


FAMILY = Family("Qwen3NextForCausalLM", read)
