"""GPT-OSS: attention with sinks, windows in every other layer, biases throughout, and experts with
a clamped gated unit, those of a layer in one tensor ``[experts, in, out]``.

Gate and up alternate there along ``out``; the policy keeps that order, and its activation reads it
(``policy/passes/biased_experts.py``).
"""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    QKV_BIAS,
    Architecture,
    Family,
    Slot,
    common,
    refuse,
)

BIASES = (
    *QKV_BIAS,
    Slot("self_attention.linear_proj.bias", "whole", ("self_attn.o_proj.bias",)),
    Slot("mlp.router.weight", "whole", ("mlp.router.weight",)),
    Slot("mlp.router.bias", "whole", ("mlp.router.bias",)),
)


def read(hf: Any) -> Architecture:
    # What vLLM has as a constant, or does not read.
    windows = ["sliding_attention", "full_attention"] * hf.num_hidden_layers
    refuse(
        hf,
        {
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "rms_norm_eps": (1e-5,),
            "layer_types": (windows[: hf.num_hidden_layers],),
        },
    )
    rope = hf.rope_parameters
    unread = ("mscale", "mscale_all_dim", "attention_factor")
    if rope["rope_type"] != "yarn" or any(map(rope.get, unread)):
        raise ValueError(
            f"config.json of {hf.model_type}: rope_parameters is {rope}, and vLLM serves this"
            f" family with YaRN alone, without {', '.join(unread)}; give the published one"
        )
    width = 2 * hf.intermediate_size
    return common(
        hf,
        layer_slots=ATTENTION
        + BIASES
        + (
            Slot(
                "self_attention.core_attention.softmax_offset",
                "rows",
                ("self_attn.sinks",),
                (hf.num_attention_heads,),
            ),
        ),
        qkv_bias=True,
        biased=True,
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_ffn_hidden_size=hf.intermediate_size,
        expert_slots=(
            Slot("linear_fc1.weight", "rows", ("gate_up_proj",), (width, hf.hidden_size)),
            Slot("linear_fc1.bias", "rows", ("gate_up_proj_bias",), (width,)),
            Slot("linear_fc2.weight", "columns", ("down_proj",)),
            Slot("linear_fc2.bias", "whole", ("down_proj_bias",)),
        ),
        expert_prefix="mlp.experts",
        fused_experts=True,
    )


FAMILY = Family("GptOssForCausalLM", read)
