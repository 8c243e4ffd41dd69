"""Qwen3-VL: the language model of Qwen3 with angles of time, row and column in turns, and a tower
of which some blocks have features for the first decoder layers (DeepStack)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.models.base import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    Architecture,
    Family,
    common,
    refuse,
)
from megatron_rl.models.vision.qwen2_5_vl import (
    Tensors,
    linear,
    mrope_section,
    patch_shape,
    vision_sizes,
)
from megatron_rl.models.vision.window_attention import window_tower

if TYPE_CHECKING:
    import torch


def read(hf: Any, **more: Any) -> Architecture:
    """``more``: fields of a language model that has experts."""
    text = hf.text_config
    refuse(text, {"attention_bias": (False,)})
    if text.rope_parameters.get("mrope_interleaved") is not True:
        raise ValueError(
            f"config.json of {hf.model_type}: rope_scaling has no mrope_interleaved = true; vLLM"
            " would take other angles than transformers. Set it, as the published models have it"
        )
    num_deep = len(hf.vision_config.deepstack_visual_indexes)
    tensors = tuple(_tensors(hf.vision_config))
    return common(
        text,
        family=hf.model_type,
        tied_embeddings=bool(hf.tie_word_embeddings),
        qk_norm=True,
        mrope_section=mrope_section(text),
        mrope_interleaved=True,
        vision=vision_sizes(hf, "gelu_pytorch_tanh", tensors, num_deep=num_deep),
        text_prefix="model.language_model.",
        tower_prefix="model.",
        **(more or dict(layer_slots=ATTENTION + QK_NORM + DENSE_MLP)),
    )


def _tensors(vision: Any) -> Tensors:
    """Name and shape of every parameter, in the order of the module."""
    hidden = vision.hidden_size
    merged = hidden * vision.spatial_merge_size**2

    def norm(name: str, width: int) -> Tensors:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def two_layers(name: str, width: int, middle: int, end: int) -> Tensors:
        yield from linear(f"{name}.linear_fc1", middle, width)
        yield from linear(f"{name}.linear_fc2", end, middle)

    yield "visual.patch_embed.proj.weight", (hidden, *patch_shape(vision))
    yield "visual.patch_embed.proj.bias", (hidden,)
    yield "visual.pos_embed.weight", (vision.num_position_embeddings, hidden)
    for number in range(vision.depth):
        block = f"visual.blocks.{number}"
        yield from norm(f"{block}.norm1", hidden)
        yield from norm(f"{block}.norm2", hidden)
        yield from linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from linear(f"{block}.attn.proj", hidden, hidden)
        yield from two_layers(f"{block}.mlp", hidden, vision.intermediate_size, hidden)
    mergers = [f"deepstack_merger_list.{at}" for at in range(len(vision.deepstack_visual_indexes))]
    for name, width in (("merger", hidden), *((each, merged) for each in mergers)):
        yield from norm(f"visual.{name}.norm", width)
        yield from two_layers(f"visual.{name}", merged, merged, vision.out_hidden_size)


def tower(hf: Any) -> torch.nn.Module:
    # Importing it takes seconds, which planners need not wait for.
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    parts = (theirs.Qwen3VLVisionModel, theirs.Qwen3VLVisionAttention)
    return window_tower(hf, *parts, theirs.apply_rotary_pos_emb_vision)


FAMILY = Family("Qwen3VLForConditionalGeneration", read, tower)
