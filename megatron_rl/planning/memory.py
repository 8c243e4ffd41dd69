"""Memory of a configuration before anything is built, for the policy and its engine.

On the host of a CUDA device, page-locked copies of the policy count exactly: they are made in
blocks that lose less than 128 KiB for each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.models import Architecture
from megatron_rl.planning.engine_memory import EngineMemory, engine_memory
from megatron_rl.planning.policy_memory import PolicyMemory, policy_memory
from megatron_rl.planning.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StageMemory(EngineMemory, PolicyMemory):
    """Bytes on one rank of a pipeline stage, by purpose."""

    stage: int


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
    stages = policy_memory(arch, parallel, precision, load)
    return [
        StageMemory(stage=stage, **vars(policy), **vars(engine))
        for stage, policy in enumerate(stages)
    ]
