"""Llama 2 and 3.x: no bias; the llama3 scaling of rotary frequencies."""

from typing import Any

from megatron_rl.models.base import ATTENTION, DENSE_MLP, Architecture, Family, common, refuse


def read(hf: Any) -> Architecture:
    refuse(hf, {"attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1,)})
    return common(hf, layer_slots=ATTENTION + DENSE_MLP)


FAMILY = Family("LlamaForCausalLM", read)
