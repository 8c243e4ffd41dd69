"""Memory of the engine on a rank, in bytes: weights, the sampler's state, key-value cache, and
what its sleep keeps.

Weights are in ``rollout.dtype``; matrices of layers under ``rollout.quantization`` in one byte.
"""

import math
from dataclasses import dataclass

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import Architecture
from megatron_rl.planning.parameter_counts import engine_parameters, is_layer_matrix
from megatron_rl.policy.state.host_memory import rounded

GIB = 2**30
_QUANTIZED_BYTES = 1
_INT32_BYTES = 4
# Sequences under way at once where ``rollout.max_num_seqs`` is null, and the GiB of a device from
# which vLLM takes the larger number (EngineArgs.get_batch_defaults in vllm/engine/arg_utils.py).
# An A100 of 80 GiB gets the smaller one: its name is not known here, and the plan errs safely.
_DEFAULT_SEQUENCES = 256
_DEFAULT_SEQUENCES_LARGE = 1024
_LARGE_DEVICE_GIB = 70


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of the engine on one rank, by purpose."""

    engine_weights: int
    engine_sampler: int  # of the sampler of GPUs, see ``sampler_tables``
    engine_unquantized: int  # the weights as they arrive, before any layer is quantized
    kv_cache: int
    # Page-locked bytes in which a rank that sleeps at level 1 keeps its weights and the tables of
    # its sampler. vLLM locks a region for each allocation; torch rounds it up to a power of two.
    engine_backup: int


def engine_memory(arch: Architecture, rollout: RolloutConfig, device_gib: float) -> EngineMemory:
    """The engine's memory on one of its ranks, on a device of ``device_gib``."""
    item_bytes = ITEM_BYTES[rollout.dtype]
    weights = backup = unquantized = 0
    for parameter, numbers, tensors in engine_parameters(arch, rollout):
        quantized = rollout.quantization is not None and is_layer_matrix(parameter)
        size = numbers * (_QUANTIZED_BYTES if quantized else item_bytes)
        weights += tensors * size
        backup += tensors * rounded(size)
        unquantized += tensors * numbers * item_bytes
    tables = sampler_tables(arch, max_sequences(rollout, device_gib))
    held = weights + sum(tables)
    if rollout.kv_cache_gib is not None:
        cache = rollout.kv_cache_gib * GIB
    else:  # what ``gpu_memory_utilization`` leaves, which may be nothing
        cache = max(0.0, rollout.gpu_memory_utilization * device_gib * GIB - held)
    return EngineMemory(
        engine_weights=weights,
        engine_sampler=sum(tables),
        engine_unquantized=unquantized,
        kv_cache=int(cache),
        engine_backup=backup + sum(map(rounded, tables)),
    )


def max_sequences(rollout: RolloutConfig, device_gib: float) -> int:
    """Sequences that the engine has under way at once, on a device of ``device_gib``."""
    large = device_gib >= _LARGE_DEVICE_GIB
    return rollout.max_num_seqs or (_DEFAULT_SEQUENCES_LARGE if large else _DEFAULT_SEQUENCES)


def sampler_tables(arch: Architecture, sequences: int) -> tuple[int, ...]:
    """Bytes of each table over the vocabulary in the sampler of vLLM's V2 model runner (of GPUs).

    For penalties, used or not: how often a sequence has answered with each token (int32), and a bit
    for each token of its prompt; for structured outputs: a bit for each token allowed. Bits stand
    in int32. The vocabulary is whole on every rank. The tables are made while the model is loaded,
    so that they sleep and wake with the weights. (PenaltiesState and StructuredOutputsWorker in
    vllm/v1/worker/gpu. The other tables have tens of MiB.)
    """
    counts = sequences * arch.vocab_size * _INT32_BYTES
    bits = sequences * math.ceil(arch.vocab_size / 32) * _INT32_BYTES
    return counts, bits, bits
