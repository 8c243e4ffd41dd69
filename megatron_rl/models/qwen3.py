"""Qwen3 (dense): RMSNorm on the query and key of each head, own head size, no bias."""

from typing import Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    Architecture,
    Family,
    common,
    refuse,
)


def read(hf: Any) -> Architecture:
    refuse(hf, {"attention_bias": (False,)})
    return common(hf, qk_norm=True, layer_slots=ATTENTION + QK_NORM + DENSE_MLP)


FAMILY = Family("Qwen3ForCausalLM", read)
