"""Number formats of parameters, gradients, optimizer states and the layers' matrix products."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.config.model_config import ITEM_BYTES
from megatron_rl.config.rules.hardware import BLOCK, Machine
from megatron_rl.config.schema import OptimConfig, ParallelConfig, PrecisionConfig

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
SOURCES = {"transformer_engine": "Transformer Engine", "apex": "apex", "torch": "torch"}


def model_fields(precision: PrecisionConfig, num_experts: int) -> dict[str, Any]:
    """The number formats, as fields of megatron's TransformerConfig."""
    dtype = _DTYPES[precision.params]
    is_bf16 = dtype == torch.bfloat16
    fields: dict[str, Any] = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=is_bf16)
    fp8 = precision.fp8
    if fp8 is None:
        return fields
    start = fp8.num_layers_at_start_in_bf16
    end = fp8.num_layers_at_end_in_bf16
    fields |= dict(
        fp8=fp8.format,
        fp8_recipe=fp8.recipe,
        fp8_param=fp8.param_gather,
        first_last_layers_bf16=start + end > 0,
        num_layers_at_start_in_bf16=start,
        num_layers_at_end_in_bf16=end,
        # Pads each expert's tokens too: their count is arbitrary.
        moe_router_padding_for_quantization=num_experts > 0,
    )
    if fp8.recipe == "delayed":
        fields |= dict(
            fp8_amax_history_len=fp8.amax_history_len, fp8_amax_compute_algo=fp8.amax_compute_algo
        )
    return fields


def ddp_config(
    parallel: ParallelConfig, precision: PrecisionConfig
) -> DistributedDataParallelConfig:
    """How gradients are accumulated and summed over data-parallel ranks."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.grad_reduce_in_float32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.distributed_optimizer,
        fp8_param_gather=precision.fp8 is not None and precision.fp8.param_gather,
    )


def optimizer_config(
    optim: OptimConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> OptimizerConfig:
    """megatron's AdamW.

    With ``adam_moments`` below float32 the two moments are kept in that format, the weights in
    float32, and the gradients in the format in which they are summed.
    """
    dtype = _DTYPES[precision.params]
    moments = _DTYPES[precision.adam_moments]
    fields: dict[str, Any] = {}
    if moments != torch.float32:
        fields = dict(
            use_precision_aware_optimizer=True,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
            main_grads_dtype=torch.float32 if precision.grad_reduce_in_float32 else dtype,
            # Whole float32 weights. Their lower halves next to the bfloat16 ones take less memory,
            # but megatron then writes no checkpoint that another layout can read.
            store_param_remainders=False,
        )
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.learning_rate,
        min_lr=optim.min_learning_rate,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp8_recipe=None if precision.fp8 is None else precision.fp8.recipe,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        **fields,
    )


def token_multiple(precision: PrecisionConfig) -> int:
    """What a rank's tokens must be a multiple of: FP8 products of the backward sum over them."""
    return 1 if precision.fp8 is None else BLOCK[precision.fp8.recipe]


@contextlib.contextmanager
def logprob_format(config: TransformerConfig, precision: PrecisionConfig) -> Iterator[None]:
    """During a pass without gradient: no FP8 where ``precision.fp8.logprobs`` is bfloat16.

    megatron reads ``config`` at every forward; weights kept in FP8 are read as bfloat16 then.
    """
    if precision.fp8 is None or precision.fp8.logprobs == "same":
        yield
        return
    number_format = config.fp8
    config.fp8 = None
    try:
        yield
    finally:
        config.fp8 = number_format


def plain(parameter: Tensor) -> Tensor:
    """The values of a parameter as an ordinary tensor: itself, unless it is kept in FP8."""
    return dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter


@torch.no_grad()
def assign(parameter: Tensor, values: Tensor) -> None:
    """Writes ``values`` into the whole parameter.

    One that is kept in FP8 is quantized, and the unrounded values are left where the optimizer
    takes its float32 copy from.
    """
    parameter.copy_(values)
    if is_float8tensor(parameter) and hasattr(parameter, "_high_precision_init_val"):
        parameter._high_precision_init_val = values.detach().cpu()


def describe(precision: PrecisionConfig, machine: Machine) -> str:
    """What was chosen, in one line.

    Example: "layers of Transformer Engine 2.20.2, weights bfloat16, FP8 tensorwise (hybrid), Adam
    of Transformer Engine".
    """
    engine = machine.transformer_engine
    layers = f"Transformer Engine {engine}" if engine else "megatron-core and torch"
    parts = [f"layers of {layers}", f"weights {precision.params}"]
    fp8 = precision.fp8
    if fp8 is not None:
        parts.append(f"FP8 {fp8.recipe} ({fp8.format})")
        ends = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
        if ends:
            parts.append(f"{ends} layers in bfloat16")
        if fp8.param_gather:
            parts.append("weights kept in FP8")
        if fp8.logprobs == "bfloat16":
            parts.append("logprobs without FP8")
    parts.append(f"Adam of {SOURCES[machine.adam]}")
    if precision.adam_moments != "float32":
        parts[-1] += f" with {precision.adam_moments} moments"
    return ", ".join(parts)
