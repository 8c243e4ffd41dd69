"""Process groups of the policy: which layouts are possible, and megatron's parallel state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.policy.families import Architecture


def layout_problems(arch: Architecture, parallel: ParallelConfig, world_size: int) -> list[str]:
    """What keeps ``arch`` from being laid out as ``parallel`` says over ``world_size`` ranks: one message each (key, value,
    remedy), none when it fits."""
    return [*_world_problems(parallel, world_size), *_size_problems(arch, parallel), *_stage_problems(arch, parallel)]


def _world_problems(parallel: ParallelConfig, world_size: int) -> list[str]:
    found = []
    dense = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % dense:
        found.append(
            f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {dense} does not divide "
            f"the world size {world_size}; change one of them, or start a multiple of {dense} processes"
        )
    experts = (parallel.expert_tensor or 1) * parallel.expert * parallel.pipeline
    if world_size % experts:
        found.append(
            f"parallel: expert_tensor {parallel.expert_tensor or 1} x expert {parallel.expert} x pipeline {parallel.pipeline} = {experts} "
            f"does not divide the world size {world_size}; change one of them, or start a multiple of {experts} processes"
        )
    if parallel.sequence and parallel.tensor == 1:
        found.append("parallel.sequence is true but parallel.tensor is 1; it splits sequences over the tensor ranks: set it to false")
    if parallel.overlap_param_gather and not (parallel.distributed_optimizer and parallel.overlap_grad_reduce):
        found.append(
            "parallel.overlap_param_gather is true; it needs parallel.distributed_optimizer=true and parallel.overlap_grad_reduce=true"
        )
    return found


def _size_problems(arch: Architecture, parallel: ParallelConfig) -> list[str]:
    found = []
    sizes = {"attention heads": arch.num_heads, "query, key and value rows": (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim}
    if arch.num_experts == 0:
        sizes["feed-forward rows"] = arch.ffn_hidden_size
    for what, size in sizes.items():
        if size % parallel.tensor:
            found.append(f"parallel.tensor is {parallel.tensor}, which does not divide the model's {size} {what}; choose a divisor")
    if arch.num_kv_heads % parallel.tensor and parallel.tensor % arch.num_kv_heads:
        found.append(
            f"parallel.tensor is {parallel.tensor}, neither a divisor nor a multiple of the model's {arch.num_kv_heads} key-value "
            "heads; choose one that is"
        )
    if arch.num_experts == 0:
        for key in ("expert", "expert_tensor"):
            if (getattr(parallel, key) or 1) > 1:
                found.append(f"parallel.{key} is {getattr(parallel, key)}, but {arch.family} has no experts; set it to 1")
        return found
    if arch.num_experts % parallel.expert:
        found.append(f"parallel.expert is {parallel.expert}, which does not divide the {arch.num_experts} experts; choose a divisor")
    if arch.expert_ffn_hidden_size % (parallel.expert_tensor or 1):
        found.append(f"parallel.expert_tensor is {parallel.expert_tensor}, which does not divide {arch.expert_ffn_hidden_size} expert rows")
    if parallel.tensor > 1 and not parallel.sequence:
        found.append("parallel.tensor is above 1 and the model has experts; megatron-core needs parallel.sequence=true then")
    return found


def _stage_problems(arch: Architecture, parallel: ParallelConfig) -> list[str]:
    found = []
    chunks = parallel.virtual_pipeline or 1
    if chunks > 1 and parallel.pipeline == 1:
        found.append(f"parallel.virtual_pipeline is {chunks} but parallel.pipeline is 1; set it to null, or use more pipeline stages")
    ends = [layers for layers in (parallel.first_stage_layers, parallel.last_stage_layers) if layers is not None]
    if ends and parallel.pipeline == 1:
        found.append("parallel.first_stage_layers / last_stage_layers are set but parallel.pipeline is 1; set them to null")
        return found
    middle, stages = arch.num_layers - sum(ends), parallel.pipeline - len(ends)
    if (stages == 0 and middle != 0) or (stages > 0 and (middle <= 0 or middle % stages)):
        found.append(
            f"parallel.pipeline is {parallel.pipeline}: {arch.num_layers} layers (first_stage_layers {parallel.first_stage_layers}, "
            f"last_stage_layers {parallel.last_stage_layers}) do not split evenly over the other stages; change one of the three"
        )
        return found
    per_stage = {*ends, *([middle // stages] if stages else [])}
    if any(layers % chunks for layers in per_stage):
        found.append(f"parallel.virtual_pipeline is {chunks}, which does not divide the layers of each stage ({sorted(per_stage)})")
    return found


@dataclass(frozen=True)
class Ranks:
    """This process in the policy's groups (sizes, ranks, and the groups that are used directly)."""

    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    context: int
    context_rank: int
    data: int
    data_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int
    tensor_group: Any
    context_group: Any
    pipeline_group: Any
    expert_group: Any  # expert x expert-tensor ranks: together they hold all experts of a stage

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    def stage_root(self, stage: int) -> int:
        """Global rank of pipeline stage ``stage`` in this rank's pipeline group."""
        return dist.get_global_rank(self.pipeline_group, stage)


def initialize(parallel: ParallelConfig) -> Ranks:
    """Collective: builds megatron's process groups. torch.distributed must be initialised and megatron's state must not."""
    assert dist.is_initialized(), "torch.distributed is not initialised"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor or 1,
    )
    state = parallel_state
    return Ranks(
        tensor=state.get_tensor_model_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        data=state.get_data_parallel_world_size(),
        data_rank=state.get_data_parallel_rank(),
        expert=state.get_expert_model_parallel_world_size(),
        expert_rank=state.get_expert_model_parallel_rank(),
        expert_tensor=state.get_expert_tensor_parallel_world_size(),
        expert_tensor_rank=state.get_expert_tensor_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        context_group=state.get_context_parallel_group(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        expert_group=state.get_expert_tensor_and_model_parallel_group(),
    )


def destroy() -> None:
    """Collective: forgets megatron's process groups."""
    parallel_state.destroy_model_parallel()
