"""What a rank holds for the engine, in bytes: weights, key-value cache, and what its sleep keeps.

Weights are in ``rollout.dtype``; with ``rollout.quantization`` the matrices of its layers have one
byte a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.config.number_formats import ITEM_BYTES
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.planning.parameter_counts import (
    engine_counts,
    is_cut_by_engine,
    is_layer_matrix,
)
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.host_memory import rounded
from megatron_rl.policy.parameter_map import (
    VISION,
    Parameter,
    expert_parameters,
    layer_parameters,
    local_shape,
    outer_parameters,
    padded_vocab,
    vision_parameters,
)

GIB = 2**30
QUANTIZED_BYTES = 1


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank, by purpose. ``backup``: see ``engine_backup_bytes``."""

    weights: int
    kv_cache: int
    backup: int


def engine_memory(arch: Architecture, rollout: RolloutConfig, device_gib: float) -> EngineMemory:
    """The engine's memory on one of its ranks, on a device of ``device_gib``."""
    weights = engine_weight_bytes(arch, rollout)
    cache = kv_cache_bytes(rollout, weights, device_gib)
    return EngineMemory(weights, cache, engine_backup_bytes(arch, rollout))


def engine_weight_bytes(arch: Architecture, rollout: RolloutConfig) -> int:
    """Bytes of the weights on one rank."""
    item_bytes = ITEM_BYTES[rollout.dtype]
    matrices = engine_counts(arch, rollout.tensor, is_layer_matrix)
    others = engine_counts(arch, rollout.tensor) - matrices
    return matrices * _matrix_bytes(rollout) + others * item_bytes


def _matrix_bytes(rollout: RolloutConfig) -> int:
    """Of one number in a matrix of a layer."""
    return ITEM_BYTES[rollout.dtype] if rollout.quantization is None else QUANTIZED_BYTES


def kv_cache_bytes(rollout: RolloutConfig, weight_bytes: int, device_gib: float) -> int:
    """Bytes of the key-value cache.

    A null ``rollout.kv_cache_gib`` is what ``gpu_memory_utilization`` leaves, which may be nothing.
    """
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * GIB)
    return max(0, int(rollout.gpu_memory_utilization * device_gib * GIB - weight_bytes))


def engine_backup_bytes(arch: Architecture, rollout: RolloutConfig) -> int:
    """Page-locked bytes that a rank of the engine takes for its weights while it sleeps at level 1.

    vLLM locks one region for each allocation, and torch rounds that up to a power of two. A large
    tensor is an allocation of its own; vLLM has one for queries, keys and values, one for gate and
    up, and each of a layer's two kinds for all of its experts together.
    """
    rows = padded_vocab(arch.vocab_size, 1, rollout.tensor)

    def locked(parameters: Iterable[Parameter], copies: int = 1) -> int:
        total = 0
        for parameter in parameters:
            numbers = copies * math.prod(local_shape(parameter, arch, rows, rollout.tensor))
            if parameter.slot.megatron.startswith(VISION) and is_cut_by_engine(parameter):
                numbers = math.ceil(numbers / rollout.tensor)
            item_bytes = ITEM_BYTES[rollout.dtype]
            if is_layer_matrix(parameter):
                item_bytes = _matrix_bytes(rollout)
            total += rounded(numbers * item_bytes)
        return total

    before, after = outer_parameters(arch)
    layer = locked(layer_parameters(arch, 0))
    if arch.num_experts:
        layer += locked(expert_parameters(arch, 0, 0), copies=arch.num_experts)
    ends = locked(vision_parameters(arch)) + locked(before) + locked(after)
    return ends + arch.num_layers * layer
