"""Process groups of the policy: megatron's parallel state, and this process's place in it."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.runtime.launch import NO_LIMIT, lift_time_limits


@dataclass(frozen=True)
class Ranks:
    """Sizes of the policy's groups, this process's rank in each, and the groups used directly."""

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
    # Tensor x context x pipeline ranks of one data-parallel rank: together they hold the model once
    # and work on the same rows. None: this rank does so alone.
    replica_group: Any
    replica_roots: tuple[int, ...]  # global rank of the first of them, by data-parallel rank
    # Data x context ranks: they hold the same dense parameters; and those with the same experts.
    copies_group: Any
    expert_copies_group: Any


def initialize(parallel: ParallelConfig) -> Ranks:
    """Collective: builds megatron's process groups.

    torch.distributed must be initialized, and megatron's state must not be.
    """
    assert dist.is_initialized(), "torch.distributed is not initialized"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=NO_LIMIT // timedelta(minutes=1),
    )
    state = parallel_state
    replicas = _replicas(parallel)
    groups = [
        dist.new_group(ranks, NO_LIMIT, group_desc="replica") if len(ranks) > 1 else None
        for ranks in replicas
    ]
    lift_time_limits()  # one of megatron's groups is made without
    data_rank = state.get_data_parallel_rank()
    assert dist.get_rank() in replicas[data_rank]
    return Ranks(
        tensor=state.get_tensor_model_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        data=state.get_data_parallel_world_size(),
        data_rank=data_rank,
        expert=state.get_expert_model_parallel_world_size(),
        expert_rank=state.get_expert_model_parallel_rank(),
        expert_tensor=state.get_expert_tensor_parallel_world_size(),
        expert_tensor_rank=state.get_expert_tensor_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        context_group=state.get_context_parallel_group(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        expert_group=state.get_expert_tensor_and_model_parallel_group(),
        replica_group=groups[data_rank],
        replica_roots=tuple(ranks[0] for ranks in replicas),
        copies_group=state.get_data_parallel_group(with_context_parallel=True),
        expert_copies_group=state.get_expert_data_parallel_group(),
    )


def _replicas(parallel: ParallelConfig) -> list[list[int]]:
    """The ranks of each data-parallel rank. Megatron numbers tensor ranks first, then context, data
    and pipeline ranks."""
    ranks = torch.arange(dist.get_world_size())
    numbered = ranks.view(parallel.pipeline, -1, parallel.context * parallel.tensor)
    return numbered.transpose(0, 1).flatten(1).tolist()
