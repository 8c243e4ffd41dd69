"""The published configurations of Qwen2.5-VL, as their config.json has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION: dict[str, Any] = dict(
    depth=32,
    hidden_act="silu",
    hidden_size=1280,
    intermediate_size=3420,
    num_heads=16,
    in_chans=3,
    patch_size=14,
    spatial_merge_size=2,
    spatial_patch_size=14,
    window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
    tokens_per_second=2,
    temporal_patch_size=2,
)
# Text and tower in one section, as transformers wrote it before version 4.52.
COMMON: dict[str, Any] = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    vision_start_token_id=151652,
    vision_end_token_id=151653,
    vision_token_id=151654,
    image_token_id=151655,
    video_token_id=151656,
    hidden_act="silu",
    max_position_embeddings=128000,
    model_type="qwen2_5_vl",
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
)
CONFIGS: dict[str, dict[str, Any]] = {
    "3B": COMMON
    | dict(
        hidden_size=2048,
        intermediate_size=11008,
        max_window_layers=70,
        num_attention_heads=16,
        num_hidden_layers=36,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        vocab_size=151936,
        vision_config=VISION | dict(out_hidden_size=2048),
    ),
    "7B": COMMON
    | dict(
        hidden_size=3584,
        intermediate_size=18944,
        max_window_layers=28,
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        vocab_size=152064,
        vision_config=VISION | dict(out_hidden_size=3584),
    ),
}


def write_config(folder: Path, size: str) -> Path:
    """A folder with the configuration of this size and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[size]))
    return folder
