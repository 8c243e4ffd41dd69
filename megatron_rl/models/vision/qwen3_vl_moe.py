"""Qwen3-VL-MoE: Qwen3-VL with the experts of Qwen3-MoE, those of a layer in one tensor."""

from typing import Any

from megatron_rl.models.base import Architecture, Family, Slot, refuse
from megatron_rl.models.moe.qwen3_moe import experts
from megatron_rl.models.vision import qwen3_vl

FUSED = (
    Slot("linear_fc1.weight", "gate_up", ("gate_up_proj",)),
    Slot("linear_fc2.weight", "columns", ("down_proj",)),
)


def read(hf: Any) -> Architecture:
    text = hf.text_config
    refuse(text, {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)})
    # transformers normalizes always, vLLM reads the key.
    if getattr(text, "norm_topk_prob", None) is not True:
        raise ValueError(
            f"config.json of {hf.model_type}: text_config has no norm_topk_prob = true; vLLM would"
            " weigh experts in another way than transformers. Set it, as the published models have"
            " it"
        )
    return qwen3_vl.read(hf, **experts(text) | dict(expert_slots=FUSED, fused_experts=True))


FAMILY = Family("Qwen3VLMoeForConditionalGeneration", read, qwen3_vl.tower)
