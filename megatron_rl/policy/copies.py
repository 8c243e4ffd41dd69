"""Bytes of what is held beside weights and optimizer: copies in FP8, page-locked copies on the
host, and what a checkpoint gathers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_rl.config.schema import PrecisionConfig, RolloutConfig
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.host_memory import rounded
from megatron_rl.policy.layout import (
    Parameter,
    expert_parameters,
    layer_parameters,
    local_shape,
    outer_parameters,
    padded_vocab,
)

FP8_COPIES = 2  # of one byte: by rows for the forward, by columns for the backward
CHECKPOINT_BYTES = 3 * 4  # weight and both moments of a parameter, in float32


def is_layer_matrix(parameter: Parameter) -> bool:
    """Whether FP8 is for it: not embedding, head, norms, biases and routers."""
    kinds = ("qkv", "gate_up", "columns")
    return parameter.slot.kind in kinds and not parameter.slot.megatron.endswith("bias")


def fp8_copy_bytes(matrices: int, stage: int, layers: list[int], precision: PrecisionConfig) -> int:
    """Bytes of the copies that Transformer Engine keeps of ``matrices`` weights of the layers of
    ``stage``, from a pass to the next. ``layers``: of each stage. Weights that are kept in FP8
    themselves have none beside them: both forms are the weight, and count as its bfloat16. Scales
    are not counted (of mxfp8, the most: a 32nd)."""
    fp8 = precision.fp8
    if fp8 is None or fp8.param_gather:
        return 0
    first = fp8.num_layers_at_start_in_bf16 if stage == 0 else 0
    last = fp8.num_layers_at_end_in_bf16 if stage == len(layers) - 1 else 0
    in_fp8 = max(0, layers[stage] - first - last)
    return FP8_COPIES * matrices * in_fp8 // layers[stage]


def engine_backup_bytes(
    arch: Architecture, rollout: RolloutConfig, element: int, quantized: int
) -> int:
    """Page-locked bytes that a rank of the engine takes for its weights while it sleeps at level 1.

    vLLM locks one piece for each allocation, and torch rounds that up to a power of two. A large
    tensor is an allocation of its own; vLLM has one for queries, keys and values, one for gate and
    up, and each of a layer's two kinds for all of its experts together. ``element``: bytes of a
    number, ``quantized``: of one of a layer's matrices.
    """
    rows = padded_vocab(arch.vocab_size, 1, rollout.tensor)

    def locked(parameters: Iterable[Parameter], times: int = 1) -> int:
        total = 0
        for parameter in parameters:
            numbers = times * math.prod(local_shape(parameter, arch, rows, rollout.tensor))
            total += rounded(numbers * (quantized if is_layer_matrix(parameter) else element))
        return total

    before, after = outer_parameters(arch)
    layer = locked(layer_parameters(arch, 0))
    if arch.num_experts:
        layer += locked(expert_parameters(arch, 0, 0), arch.num_experts)
    return locked(before) + arch.num_layers * layer + locked(after)
