"""Number formats: of parameters, gradients and optimizer states."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig

from megatron_rl.config.schema import ParallelConfig, PrecisionConfig


def ddp_config(parallel: ParallelConfig, precision: PrecisionConfig) -> DistributedDataParallelConfig:
    """How gradients are accumulated and summed over data-parallel ranks: in float32, or in the parameters' format."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.grad_reduce_in_float32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
