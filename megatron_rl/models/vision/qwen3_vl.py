"""Qwen3-VL: the language model of Qwen3 with angles of time, row and column in turns, and a tower
of which some blocks have features for the first decoder layers (DeepStack)."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    Architecture,
    Family,
    common,
    refuse,
)
from megatron_rl.models.vision.qwen2_5_vl import mrope_section, vision_sizes
from megatron_rl.models.vision.window_attention import window_tower


def read(hf: Any, **more: Any) -> Architecture:
    """``more``: fields of a language model that has experts."""
    text = hf.text_config
    refuse(text, {"attention_bias": (False,)})
    num_deep = len(hf.vision_config.deepstack_visual_indexes)
    return common(
        text,
        **with_tower(hf, tower, num_deep),
        qk_norm=True,
        **(more or dict(layer_slots=ATTENTION + QK_NORM + DENSE_MLP)),
    )


def with_tower(
    hf: Any, make: Callable[[Any], torch.nn.Module], num_deep: int = 0
) -> dict[str, Any]:
    """The fields of a model with a tower of this kind, which ``make`` makes."""
    text = hf.text_config
    if text.rope_parameters.get("mrope_interleaved") is not True:
        raise ValueError(
            f"config.json of {hf.model_type}: rope_scaling has no mrope_interleaved = true; vLLM"
            " would take other angles than transformers. Set it, as the published models have it"
        )
    return dict(
        family=hf.model_type,
        tied_embeddings=bool(hf.tie_word_embeddings),
        mrope_section=mrope_section(text),
        mrope_interleaved=True,
        vision=vision_sizes(hf, "gelu_pytorch_tanh", make, num_deep=num_deep),
        text_prefix="model.language_model.",
        tower_prefix="model.",
    )


def tower(hf: Any) -> torch.nn.Module:
    # As in ``qwen2_5_vl``.
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    parts = (theirs.Qwen3VLVisionModel, theirs.Qwen3VLVisionAttention)
    return window_tower(hf, *parts, theirs.apply_rotary_pos_emb_vision)


FAMILY = Family("Qwen3VLForConditionalGeneration", read, tower)
