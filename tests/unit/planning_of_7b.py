"""A model of 7 billion parameters and a plan for it, for the tests of planning."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen3MoeConfig

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config, ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.models import Architecture, architecture_from
from megatron_rl.planning import memory
from megatron_rl.planning.memory import StageMemory, Workload
from megatron_rl.planning.phases import MemoryBudget

QWEN2_5_7B = architecture_from(
    Qwen2Config(
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_hidden_layers=28,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
    "Qwen2ForCausalLM",
)
# A layer: (3584 + 2 x 512) x 3584 + 4608 + 3584^2 + 3 x 3584 x 18944 + 2 x 3584.
LAYER = 233_057_792
EMBEDDING = 544_997_376  # 152064 x 3584; the head has as many, the last norm 3584
PARAMETERS = 28 * LAYER + 2 * EMBEDDING + 3584
LOAD = Workload(
    world_size=8,
    tokens_per_microbatch=1000,
    tokens_per_minibatch=10**6,
    logprob_chunk_tokens=256,
    make_vocab_divisible_by=1,
    fused=True,
)
GPU = MemoryBudget("cuda", 80.0)
ROLLOUT: dict[str, Any] = {"stop": (), "tensor": 2, "kv_cache_gib": 3.0}
PRECISION: dict[str, Any] = {"params": "bfloat16", "grad_reduce_in_float32": True}


def of_experts(count: int, *, layers: int, tied: bool = False) -> Architecture:
    """A small model with experts."""
    sizes = Qwen3MoeConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=layers,
        vocab_size=128,
        num_experts=count,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=tied,
    )
    return architecture_from(sizes, "Qwen3MoeForCausalLM")


def parallel(**layout: Any) -> ParallelConfig:
    return ParallelConfig(
        **{**compose("parallel/single"), "distributed_optimizer": False, **layout}
    )


def plan(
    layout: dict[str, Any],
    load: Workload = LOAD,
    arch: Architecture = QWEN2_5_7B,
    device_gib: float = 80.0,
    rollout: dict[str, Any] | None = None,
    fp8: dict[str, Any] | None = None,
) -> list[StageMemory]:
    engine = engine_settings(**(rollout or {}))
    precision = PrecisionConfig(**{**compose("precision/bf16"), **PRECISION, "fp8": fp8})
    return memory.plan(arch, parallel(**layout), precision, engine, load, device_gib)


def engine_settings(**more: Any) -> RolloutConfig:
    return RolloutConfig(**{**compose("rollout/vllm"), **ROLLOUT, **more})


def config(*overrides: str) -> Config:
    values = compose("config", ["model.path=m", "data.train=t", "data.eval=e", *overrides])
    return validate(Config, values, "test")
