"""GLM-4.5 and 4.6: first layers dense, then experts beside a shared one, chosen by sigmoids and a
bias; half of each head is rotated.

The layer behind the last one of a checkpoint, which predicts further tokens, is left unread.
"""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    QKV_BIAS,
    Architecture,
    Family,
    Slot,
    common,
    refuse,
)
from megatron_rl.models.moe.qwen3_moe import EXPERT, ROUTER, shared_expert

BIASED_ROUTER = (
    *ROUTER,
    Slot("mlp.router.expert_bias", "whole", ("mlp.gate.e_score_correction_bias",)),
)
SHARED_EXPERT = shared_expert("mlp.shared_experts")


def with_shared_expert(hf: Any, attention: tuple[Slot, ...], **more: Any) -> Architecture:
    """First layers dense, then experts beside a shared one; ``more`` fields."""
    groups, chosen = hf.n_group or 1, hf.topk_group or 1
    # The score of a group is the sum of its two best experts in transformers and vLLM, and of its
    # best ``num_experts_per_tok // topk_group`` in megatron.
    as_in_megatron = 1 if groups == 1 else hf.num_experts_per_tok // 2
    refuse(hf, {"norm_topk_prob": (True,), "topk_group": (as_in_megatron, None)})
    return common(
        hf,
        layer_slots=attention + BIASED_ROUTER + SHARED_EXPERT,
        num_experts=hf.n_routed_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_ffn_hidden_size=hf.moe_intermediate_size,
        expert_slots=EXPERT,
        expert_prefix="mlp.experts",
        num_dense_layers=hf.first_k_dense_replace,
        dense_slots=attention + DENSE_MLP,
        num_unread_layers=getattr(hf, "num_nextn_predict_layers", None) or 0,
        shared_ffn_hidden_size=hf.n_shared_experts * hf.moe_intermediate_size,
        sigmoid_router=True,
        router_scale=hf.routed_scaling_factor,
        router_groups=(groups, chosen),
        **more,
    )


def read(hf: Any) -> Architecture:
    attention = ATTENTION + (QKV_BIAS if hf.attention_bias else ())
    attention += QK_NORM if hf.use_qk_norm else ()
    return with_shared_expert(
        hf,
        attention,
        qkv_bias=hf.attention_bias,
        qk_norm=hf.use_qk_norm,
        rotary_share=hf.rope_parameters["partial_rotary_factor"],
    )


FAMILY = Family("Glm4MoeForCausalLM", read)
