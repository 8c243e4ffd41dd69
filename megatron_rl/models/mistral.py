"""Mistral: Llama, in older models with a window of the last tokens."""

from typing import Any

from megatron_rl.models.base import ATTENTION, DENSE_MLP, Architecture, Family, common


def read(hf: Any) -> Architecture:
    return common(hf, layer_slots=ATTENTION + DENSE_MLP)


FAMILY = Family("MistralForCausalLM", read)
