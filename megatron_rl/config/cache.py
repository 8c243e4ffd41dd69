"""The least key-value cache an engine can work with, from the sizes of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.schema import Config, RolloutConfig

GIB = 2**30
BLOCK_TOKENS = {"cpu": 128, "gpu": 16}  # tokens of one block of the cache, as vLLM cuts it
BYTES = {"float32": 4, "bfloat16": 2}
SIZES = ("num_attention_heads", "num_hidden_layers")


def cache_problems(config: Config, hf_config: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    """A message where ``rollout.kv_cache_gib`` has no room for one longest sequence."""
    rollout = config.rollout
    if rollout.kv_cache_gib is None:
        return
    least = least_cache_bytes(rollout, hf_config, BLOCK_TOKENS["cpu" if on_cpu else "gpu"])
    if least is None or rollout.kv_cache_gib * GIB >= least:
        return
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    # Rounded up, so that the number that is named is enough.
    enough = math.ceil(least / GIB * 1e6) / 1e6
    yield (
        f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: one sequence of rollout.max_prompt_tokens + "
        f"rollout.max_response_tokens = {longest} tokens takes {least / 2**20:.3g} MiB; set at least "
        f"{enough:g}, or several times that so that sequences run together"
    )


def least_cache_bytes(
    rollout: RolloutConfig, hf_config: Mapping[str, Any], block_tokens: int
) -> int | None:
    """Bytes of keys and values of the longest sequence on one rank, in whole blocks, and of the
    block the engine keeps empty; None where ``hf_config`` does not tell the sizes.

    Formula: (ceil(tokens / block) + 1) * block * 2 * layers * kv_heads * head_dim * bytes, with the
    heads of one rank and the bytes of a number.
    Example: 1024 tokens, 28 layers, 4 heads of 128 on two ranks, bfloat16, blocks of 16:
    65 * 16 * 2 * 28 * 2 * 128 * 2 bytes = 28.4 MiB.
    """
    if any(not isinstance(hf_config.get(name), int) for name in SIZES):
        return None
    heads, layers = (hf_config[name] for name in SIZES)
    kv_heads = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hf_config.get("hidden_size", 0) // max(1, heads)
    if not head_dim:
        return None
    tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    blocks = -(-tokens // block_tokens) + 1
    mine = max(1, kv_heads // rollout.tensor)  # heads that do not divide are held by several ranks
    return blocks * block_tokens * 2 * layers * mine * head_dim * BYTES[rollout.dtype]
