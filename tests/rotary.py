"""Rotary positions of tiny models, as configurations have them."""

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN2 = {key: value for key, value in YARN.items() if "mscale" not in key}
# Of half of a head's numbers, as Qwen3.5 has them.
TURNS: dict[str, Any] = dict(
    rope_type="default",
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
