"""Qwen2 and Qwen2.5: bias on query, key and value."""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QKV_BIAS,
    Architecture,
    Family,
    common,
)


def read(hf: Any) -> Architecture:
    return common(hf, qkv_bias=True, layer_slots=ATTENTION + QKV_BIAS + DENSE_MLP)


FAMILY = Family("Qwen2ForCausalLM", read)
