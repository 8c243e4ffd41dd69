"""Qwen3-Next: three layers with a gated delta net, then one with attention whose output is gated;
experts beside a shared one, which is gated too. A quarter of each head is rotated.

The tensors ``mtp.*`` of a checkpoint, which predict further tokens, are left unread.
"""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
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
from megatron_rl.models.moe.qwen3_moe import OPTIONS, ROUTER, experts, shared_expert

KINDS = ("linear_attention", "full_attention")


def delta_slots(linear: LinearAttention, hidden: int) -> tuple[Slot, ...]:
    """Of the gated delta net. Where it is ``fused`` the rows of ``in_proj_qkvz`` and
    ``in_proj_ba`` come by key head, and in it query, key, its values, their gates; and the rates
    and decays of its values. Else they come by kind, as those of the filter."""
    heads, key = linear.key_heads, linear.key_dim
    group = linear.value_heads // heads  # value heads of a key head
    value, all_keys = group * linear.value_dim, heads * key
    wide = 2 * (key + value)
    filters = (
        Part("query", 0, 0, key, key, heads),
        Part("key", 0, all_keys, key, key, heads),
        Part("value", 0, 2 * all_keys, value, value, heads),
    )
    matrices = [
        f"in_proj_{x}.weight" for x in (("qkvz", "ba") if linear.fused else ("qkv", "z", "b", "a"))
    ]
    inputs = (
        *filters,
        Part("z", 1, 0, value, value, heads),
        Part("beta", 2, 0, group, group, heads),
        Part("alpha", 3, 0, group, group, heads),
    )
    if linear.fused:
        inputs = (
            Part("query", 0, 0, key, wide, heads),
            Part("key", 0, key, key, wide, heads),
            Part("value", 0, 2 * key, value, wide, heads),
            Part("z", 0, 2 * key + value, value, wide, heads),
            Part("beta", 1, 0, group, 2 * group, heads),
            Part("alpha", 1, group, group, 2 * group, heads),
        )

    def slot(name: str, kind: Kind, shape: tuple[int, ...], *hf: str, parts: Any = ()) -> Slot:
        names = tuple(f"linear_attn.{one}" for one in hf or (name,))
        return Slot(f"self_attention.{name}", kind, names, shape, parts)

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


def hybrid(hf: Any, *, fused: bool, **more: Any) -> Architecture:
    """With the layers of ``hf.layer_types``, and with experts where it has any; ``more`` fields."""
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
        fused=fused,
    )
    feed_forward = DENSE_MLP
    fields: dict[str, Any] = dict(layer_slots=ATTENTION + QK_NORM + DENSE_MLP)
    if hasattr(hf, "num_experts"):
        name, shape = "mlp.shared_expert_gate.weight", (1, hf.hidden_size)
        gate = Slot("mlp.shared_experts.gate_weight", "whole", (name,), shape)
        both = (*shared_expert("mlp.shared_expert"), gate)
        feed_forward = ROUTER + both
        fields = experts(hf, both)
        fields["shared_ffn_hidden_size"] = hf.shared_expert_intermediate_size
    delta = delta_slots(linear, hf.hidden_size)
    return common(
        hf,
        **fields | more,
        linear_slots=(ATTENTION[0], *delta, ATTENTION[3], *feed_forward),
        linear=linear,
        qk_norm=True,
        centered_norms=True,
        gated_outputs=True,
        rotary_share=hf.rope_parameters["partial_rotary_factor"],
    )


def read(hf: Any) -> Architecture:
    refuse(hf, OPTIONS)
    return hybrid(hf, fused=True)


FAMILY = Family("Qwen3NextForCausalLM", read)
