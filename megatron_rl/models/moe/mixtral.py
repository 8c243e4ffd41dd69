"""Mixtral: Mistral attention, every layer a mixture of experts (w1 gate, w3 up, w2 down)."""

from typing import Any

from megatron_rl.models.base import ATTENTION, Architecture, Family, Slot, common, refuse

ROUTER = (Slot("mlp.router.weight", "whole", ("block_sparse_moe.gate.weight",)),)
EXPERT = (
    Slot("linear_fc1.weight", "gate_up", ("w1.weight", "w3.weight")),
    Slot("linear_fc2.weight", "columns", ("w2.weight",)),
)


def read(hf: Any) -> Architecture:
    refuse(hf, {"router_jitter_noise": (0.0,)})
    return common(
        hf,
        layer_slots=ATTENTION + ROUTER,
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        expert_ffn_hidden_size=hf.intermediate_size,
        expert_slots=EXPERT,
        expert_prefix="block_sparse_moe.experts",
    )


FAMILY = Family("MixtralForCausalLM", read)
