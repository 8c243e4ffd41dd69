"""Gemma 3 without a tower: norms before and behind attention and feed-forward part, which multiply
by 1 + weight; embeddings times the square root of their width; windows in most layers, which have a
rotary base of their own."""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    Architecture,
    Family,
    Slot,
    common,
    refuse,
)

NORMS = tuple(
    Slot(f"{megatron}.weight", "whole", (f"{name}_layernorm.weight",))
    for megatron, name in (
        ("self_attn_bda.norm", "post_attention"),
        ("pre_mlp_layernorm", "pre_feedforward"),
        ("mlp_bda.norm", "post_feedforward"),
    )
)


def read(hf: Any) -> Architecture:
    refuse(
        hf,
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
    )
    return common(
        hf,
        layer_slots=ATTENTION[:-1] + QK_NORM + NORMS + DENSE_MLP,
        qk_norm=True,
        centered_norms=True,
        output_norms=True,
        activation="gelu_tanh",
        embedding_scale=hf.hidden_size**0.5,
        query_scalar=hf.query_pre_attn_scalar,
    )


FAMILY = Family("Gemma3ForCausalLM", read)
