"""Llama 2 and 3.x, and what differs from it in an option or two: Mistral, Phi-3 and Phi-4 (14B)."""

from typing import Any

from megatron_rl.models.base import ATTENTION, DENSE_MLP, Architecture, Family, Slot, common, refuse


def read(hf: Any) -> Architecture:
    """No bias; the llama3 scaling of rotary frequencies."""
    refuse(hf, {"attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1,)})
    return common(hf, layer_slots=ATTENTION + DENSE_MLP)


def read_mistral(hf: Any) -> Architecture:
    """In older models with a window of the last tokens."""
    return common(hf, layer_slots=ATTENTION + DENSE_MLP)


def read_phi(hf: Any) -> Architecture:
    """Query, key and value are one tensor, gate and up another."""
    norm, _, *others = ATTENTION
    qkv = Slot("self_attention.linear_qkv.weight", "qkv", ("self_attn.qkv_proj.weight",))
    gate_up = Slot("mlp.linear_fc1.weight", "gate_up", ("mlp.gate_up_proj.weight",))
    return common(hf, layer_slots=(norm, qkv, *others, gate_up, DENSE_MLP[1]))


FAMILIES = (
    Family("LlamaForCausalLM", read),
    Family("MistralForCausalLM", read_mistral),
    Family("Phi3ForCausalLM", read_phi),
)
