"""Options of tiny models, as configurations have them: rotary positions, kinds of layers."""

from typing import Any

from megatron_rl.models.moe.deepseek_v3 import ROUTER

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
# Of OLMo 3: with its factor of attention, in layers without windows.
YARN_OR_PLAIN = {
    "full_attention": YARN2 | {"attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Of half of a head's numbers, as Qwen3.5 has them.
TURNS: dict[str, Any] = dict(
    rope_type="default",
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
LATENT: dict[str, Any] = dict(
    vocab_size=128,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    **ROUTER,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=4,
    moe_intermediate_size=48,
    n_shared_experts=1,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    rope_parameters=YARN,
    tie_word_embeddings=False,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
)
# Of a gated delta net in every other layer.
DELTA: dict[str, Any] = dict(
    vocab_size=128,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=["linear_attention", "full_attention"] * 2,
    tie_word_embeddings=False,
)
