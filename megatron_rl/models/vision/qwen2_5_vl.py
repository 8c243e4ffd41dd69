"""Qwen2.5-VL: the language model of Qwen2 with positions of time, row and column, and a tower."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QKV_BIAS,
    Architecture,
    Family,
    Vision,
    common,
    refuse,
)
from megatron_rl.models.vision.window_attention import window_tower

# transformers keeps the parts of its model apart; the published files have the names of before.
_PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


def read(hf: Any) -> Architecture:
    if not hasattr(hf, "vision_config"):
        raise ValueError(
            f"config.json: model_type is {hf.model_type!r}, which has no vision part, but"
            f" architectures names {FAMILY.architecture}; correct one of the two"
        )
    text = hf.text_config
    refuse(text, {"use_sliding_window": (False,)})
    return common(
        text,
        family=hf.model_type,
        tied_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=True,
        layer_slots=ATTENTION + QKV_BIAS + DENSE_MLP,
        mrope_section=mrope_section(text),
        vision=vision_sizes(hf, "silu", tower),
        prefixes=_PREFIXES,
    )


def mrope_section(text: Any) -> tuple[int, ...]:
    section = tuple(text.rope_parameters.get("mrope_section") or ())
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0))
    if len(section) != 3 or 2 * sum(section) != rotated:
        raise ValueError(
            f"config.json of {text.model_type}: mrope_section is {list(section)}; three numbers"
            f" that sum to half the rotated part of a head, of {rotated}, are supported, correct it"
        )
    return section


def vision_sizes(
    hf: Any, activation: str, make: Callable[[Any], torch.nn.Module], **more: Any
) -> Vision:
    """The tower of ``hf.vision_config``, which ``make`` makes; ``more`` fields."""
    vision = hf.vision_config
    refuse(vision, {"hidden_act": (activation,)})
    if vision.out_hidden_size != hf.text_config.hidden_size:
        raise ValueError(
            f"config.json of {hf.model_type}: vision_config.out_hidden_size is"
            f" {vision.out_hidden_size}, but hidden_size is {hf.text_config.hidden_size}; correct"
            " the key"
        )
    with torch.device("meta"):  # names and shapes alone
        named = list(make(hf).named_parameters())
    return Vision(
        tensors=tuple((f"visual.{name}", tuple(each.shape)) for name, each in named),
        image_token=hf.image_token_id,
        merge=vision.spatial_merge_size,
        patch_numbers=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        depth=vision.depth,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=vision.intermediate_size,
        **more,
    )


def tower(hf: Any) -> torch.nn.Module:
    # Importing it takes seconds, which text models need not wait for.
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    parts = (theirs.Qwen2_5_VisionTransformerPretrainedModel, theirs.Qwen2_5_VLVisionAttention)
    return window_tower(hf, *parts, theirs.apply_rotary_pos_emb_vision)


FAMILY = Family("Qwen2_5_VLForConditionalGeneration", read, tower)
