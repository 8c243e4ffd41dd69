"""Two small architectures, dense and with experts."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen3MoeConfig

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, PrecisionConfig
from megatron_rl.models import Architecture, architecture_from

SMALL: dict[str, Any] = dict(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=128,
    tie_word_embeddings=False,
)
DENSE = architecture_from(Qwen2Config(**SMALL, intermediate_size=96), "Qwen2ForCausalLM")


def experts(number: int) -> Architecture:
    config = Qwen3MoeConfig(
        **SMALL,
        head_dim=16,
        num_experts=number,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return architecture_from(config, "Qwen3MoeForCausalLM")


EXPERTS = experts(8)


def precision(*overrides: str) -> PrecisionConfig:
    given = ["model.path=m", "data.train=t", "data.eval=e", "precision=bf16", *overrides]
    return validate(Config, compose("config", given), "test").precision
