"""DeepSeek-V3 and R1, Moonlight, Kimi K2: latent attention; first layers dense, then experts beside
a shared one, chosen by sigmoids and a bias among the best groups.

The norms of the latent vectors take ``rms_norm_eps``, as in vLLM; transformers has 1e-6 there. The
layer behind the last one of a checkpoint, which predicts further tokens, is left unread.
"""

from typing import Any

from transformers import AutoConfig, DeepseekV3Config

from megatron_rl.models.base import Architecture, Family, LatentAttention, Slot, refuse
from megatron_rl.models.moe.glm4_moe import with_shared_expert

BLOCK_NORMS = (
    Slot("input_layernorm.weight", "whole", ("input_layernorm.weight",)),
    Slot("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",)),
)


def attention(hf: Any) -> tuple[Slot, ...]:
    """Matrices and norms of latent attention."""
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    query_rows = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    rank, query_rank = hf.kv_lora_rank, hf.q_lora_rank
    rows = (("linear_q_proj", "rows", "q_proj", (query_rows, hidden)),)
    if query_rank is not None:
        rows = (
            ("linear_q_down_proj", "whole", "q_a_proj", (query_rank, hidden)),
            ("q_layernorm", "whole", "q_a_layernorm", (query_rank,)),
            ("linear_q_up_proj", "rows", "q_b_proj", (query_rows, query_rank)),
        )
    up_rows = heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    rows += (
        (
            "linear_kv_down_proj",
            "whole",
            "kv_a_proj_with_mqa",
            (rank + hf.qk_rope_head_dim, hidden),
        ),
        ("kv_layernorm", "whole", "kv_a_layernorm", (rank,)),
        ("linear_kv_up_proj", "rows", "kv_b_proj", (up_rows, rank)),
        ("linear_proj", "columns", "o_proj", (hidden, heads * hf.v_head_dim)),
    )
    return tuple(
        Slot(f"self_attention.{megatron}.weight", kind, (f"self_attn.{name}.weight",), shape)
        for megatron, kind, name, shape in rows
    )


class KimiK2Config(DeepseekV3Config):
    """Kimi K2 has another name for the same, which transformers does not know; vLLM does."""

    model_type = "kimi_k2"


AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
# Keys that published models have, and transformers does not write.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def read(hf: Any) -> Architecture:
    for key, value in ROUTER.items():
        if getattr(hf, key, None) != value:
            raise ValueError(
                f"config.json of {hf.model_type}: {key} is {getattr(hf, key, 'absent')}; vLLM"
                f' chooses experts in another way then. Add "{key}": "{value}" if the model is of'
                " that kind, or give another model"
            )
    refuse(
        hf,
        {
            "attention_bias": (False,),
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            "head_dim": (hf.qk_rope_head_dim,),  # transformers takes rotary angles by it
        },
    )
    rope = hf.rope_parameters
    if rope.get("mscale", 1.0) != rope.get("mscale_all_dim", 1.0):
        raise ValueError(
            f"config.json of {hf.model_type}: rope_scaling has mscale {rope.get('mscale')} and"
            f" mscale_all_dim {rope.get('mscale_all_dim')}, which the policy implements where they"
            " are equal; give another model"
        )
    return with_shared_expert(
        hf,
        BLOCK_NORMS + attention(hf),
        family=DeepseekV3Config.model_type,
        qk_norm=True,
        latent=LatentAttention(
            query_rank=hf.q_lora_rank,
            rank=hf.kv_lora_rank,
            plain_dim=hf.qk_nope_head_dim,
            rotary_dim=hf.qk_rope_head_dim,
            value_dim=hf.v_head_dim,
            rotary_factor=rope.get("factor", 1.0),
            softmax_factor=rope.get("mscale_all_dim", 0.0),
        ),
    )


FAMILY = Family("DeepseekV3ForCausalLM", read)
