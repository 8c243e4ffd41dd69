"""Qwen3.5: the layers of Qwen3-Next with four input matrices of a delta net, dense or with experts;
alone, or behind the tower of Qwen3-VL without its features for the first layers.

Text alone has equal positions of time, row and column: its angles are those of plain positions.
"""

from typing import Any

import torch

from megatron_rl.models.base import Architecture, Family, refuse
from megatron_rl.models.hybrid.qwen3_next import hybrid
from megatron_rl.models.vision.qwen3_vl import with_tower
from megatron_rl.models.vision.qwen3_vl_moe import FUSED
from megatron_rl.models.vision.window_attention import window_tower


def read(hf: Any, **more: Any) -> Architecture:
    check_sections(hf, tower=False)
    refuse(
        hf,
        {
            "attention_bias": (False,),
            "attn_output_gate": (True,),
            "layer_scale": (False, None),
            "mlp_only_layers": ([], None),
            "norm_topk_prob": (True,),
        },
    )
    return hybrid(hf, fused=False, **more)


def check_sections(hf: Any, *, tower: bool) -> None:
    if hasattr(getattr(hf, "text_config", None), "model_type") != tower:
        raise ValueError(
            f"config.json: model_type is {hf.model_type!r}, which has {'no' if tower else 'a'}"
            f" text_config, but architectures names a model with{'' if tower else 'out'} a tower;"
            " correct one of the two"
        )


def read_with_tower(hf: Any) -> Architecture:
    """Of published files: they have the experts of a layer in one ``[experts, out, in]``."""
    check_sections(hf, tower=True)
    text = hf.text_config
    fused: dict[str, Any] = {}
    refuse(hf.vision_config, {"deepstack_visual_indexes": ([],)})
    if text.tie_word_embeddings != hf.tie_word_embeddings:
        raise ValueError(
            f"config.json of {hf.model_type}: tie_word_embeddings is {hf.tie_word_embeddings}, and"
            f" {text.tie_word_embeddings} in text_config, which vLLM reads; make the two equal, as"
            " the published models have them"
        )
    if hasattr(text, "num_experts"):
        fused = dict(expert_slots=FUSED, fused_experts=True, turned_experts=False)
    return read(text, **with_tower(hf, tower), **fused)


def tower(hf: Any) -> torch.nn.Module:
    # As in ``qwen2_5_vl``.
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    parts = (theirs.Qwen3_5VisionModel, theirs.Qwen3_5VisionAttention)
    return window_tower(hf, *parts, theirs.apply_rotary_pos_emb_vision)


FAMILIES = (
    Family("Qwen3_5ForCausalLM", read),
    Family("Qwen3_5MoeForCausalLM", read),
    Family("Qwen3_5ForConditionalGeneration", read_with_tower, tower),
    Family("Qwen3_5MoeForConditionalGeneration", read_with_tower, tower),
)
