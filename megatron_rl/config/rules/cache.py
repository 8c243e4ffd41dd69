"""The least key-value cache an engine can work with, from the sizes of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.model_config import ModelSizes, model_sizes
from megatron_rl.config.number_formats import ITEM_BYTES
from megatron_rl.config.rules.layout_rules import longest_engine_stage
from megatron_rl.config.schema import Config, RolloutConfig

GIB = 2**30
_BLOCK_TOKENS = {"cpu": 128, "gpu": 16}  # tokens of one block of the cache, as vLLM cuts it


def cache_problems(config: Config, hf_config: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    """One message when ``rollout.kv_cache_gib`` cannot hold one sequence of the longest kind."""
    rollout = config.rollout
    if rollout.kv_cache_gib is None:
        return
    least = least_cache_bytes(rollout, hf_config, _BLOCK_TOKENS["cpu" if on_cpu else "gpu"])
    if least is None or rollout.kv_cache_gib * GIB >= least:
        return
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    # Rounded up, so that the number that is named is enough.
    enough = math.ceil(least / GIB * 1e6) / 1e6
    yield (
        f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: one sequence of"
        f" rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens takes"
        f" {least / 2**20:.3g} MiB; set at least {enough:g}, or several times that so that"
        " sequences run together"
    )


def least_cache_bytes(
    rollout: RolloutConfig, hf_config: Mapping[str, Any], block_tokens: int
) -> int | None:
    """Bytes that the longest sequence takes on one rank, in whole blocks; None where ``hf_config``
    lacks a size. vLLM keeps one block more, which is always empty.

    Formula: (ceil(tokens / block) + 1) * block * 2 * layers * kv_heads * head_dim * bytes, with the
    layers of the longest stage, the heads of one rank and the bytes of a number.
    Example: 1024 tokens, 28 layers, 4 heads of 128 on two ranks, bfloat16, blocks of 16:
    65 * 16 * 2 * 28 * 2 * 128 * 2 bytes = 28.4 MiB.
    """
    sizes = model_sizes(hf_config)
    if 0 in (sizes.num_layers, sizes.num_heads, sizes.head_dim):
        return None
    tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    num_blocks = math.ceil(tokens / block_tokens) + 1
    return num_blocks * block_tokens * token_bytes(rollout, sizes)


def token_bytes(rollout: RolloutConfig, sizes: ModelSizes) -> int:
    """Keys and values of one token on one rank, of the longest stage."""
    # Where ranks outnumber the key-value heads, several hold the same head.
    heads_of_rank = max(1, sizes.num_kv_heads // rollout.tensor)
    layers = longest_engine_stage(sizes.num_layers, rollout.pipeline)
    return 2 * layers * heads_of_rank * sizes.head_dim * ITEM_BYTES[rollout.dtype]
