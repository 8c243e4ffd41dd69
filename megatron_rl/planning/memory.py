"""Memory of a configuration before anything is built, for the policy and its engine.

Beside a CUDA device, page-locked copies of the policy on the host count exactly: they are made in
blocks that lose less than 128 KiB for each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.models import Architecture
from megatron_rl.planning.engine_memory import engine_memory
from megatron_rl.planning.policy_memory import policy_memory
from megatron_rl.planning.workload import Workload


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage, by purpose.

    Attributes:
        logits: the live chunk and the head's float32 gradient.
        reference: the starting weights, which are kept on the host (a pass with them borrows the
            gradients' memory).
        fp8_copies: copies of weights that FP8 layers keep between passes.
        engine_sampler: of the sampler of GPUs.
        engine_unquantized: the engine's weights before they are quantized.
        engine_backup: weights that a sleeping engine keeps on the host.
        checkpoint_copy: this rank's share of a checkpoint, on the host while threads write it.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    engine_weights: int
    engine_sampler: int
    engine_unquantized: int
    kv_cache: int
    reference: int
    fp8_copies: int
    engine_backup: int
    checkpoint_copy: int


def plan(
    arch: Architecture,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    rollout: RolloutConfig,
    load: Workload,
    device_gib: float,
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage."""
    engine = engine_memory(arch, rollout, device_gib)
    policy_stages = policy_memory(arch, parallel, precision, load)
    return [
        StageMemory(
            stage=stage,
            weights=policy.weights,
            gradients=policy.gradients,
            optimizer=policy.optimizer,
            activations=policy.activations,
            logits=policy.logits,
            engine_weights=engine.weights,
            engine_sampler=engine.sampler,
            engine_unquantized=engine.unquantized,
            kv_cache=engine.kv_cache,
            reference=policy.reference,
            fp8_copies=policy.fp8_copies,
            engine_backup=engine.backup,
            checkpoint_copy=policy.checkpoint_copy,
        )
        for stage, policy in enumerate(policy_stages)
    ]
