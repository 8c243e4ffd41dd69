"""Qwen3-MoE: Qwen3 attention, every layer a mixture of experts without a shared one."""

from typing import Any

from megatron_rl.models.base import ATTENTION, QK_NORM, Architecture, Family, Slot, common, refuse

ROUTER = (Slot("mlp.router.weight", "whole", ("mlp.gate.weight",)),)
EXPERT = (
    Slot("linear_fc1.weight", "gate_up", ("gate_proj.weight", "up_proj.weight")),
    Slot("linear_fc2.weight", "columns", ("down_proj.weight",)),
)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "norm_topk_prob": (True,),
}


def shared_expert(prefix: str) -> tuple[Slot, ...]:
    """Of the expert that every token visits, which HF calls ``prefix``."""
    return tuple(
        Slot(f"mlp.shared_experts.{one.megatron}", one.kind, tuple(f"{prefix}.{x}" for x in one.hf))
        for one in EXPERT
    )


def read(hf: Any) -> Architecture:
    refuse(hf, OPTIONS)
    return common(hf, qk_norm=True, **experts(hf))


def experts(hf: Any, more: tuple[Slot, ...] = ()) -> dict[str, Any]:
    """What the architecture has beside that of a dense model; ``more`` slots of a layer."""
    return dict(
        layer_slots=ATTENTION + QK_NORM + ROUTER + more,
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_ffn_hidden_size=hf.moe_intermediate_size,
        expert_slots=EXPERT,
        expert_prefix="mlp.experts",
    )


FAMILY = Family("Qwen3MoeForCausalLM", read)
