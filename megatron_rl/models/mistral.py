"""Mistral: Llama without sliding window."""

from typing import Any

from megatron_rl.models.base import ATTENTION, DENSE_MLP, Architecture, Family, common, refuse


def read(hf: Any) -> Architecture:
    refuse(hf, {"sliding_window": (None,)})
    return common(hf, layer_slots=ATTENTION + DENSE_MLP)


FAMILY = Family("MistralForCausalLM", read)
