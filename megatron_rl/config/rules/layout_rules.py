"""Rules for parallel sizes of a model: pure arithmetic, one message for each broken rule.

The command line, the memory plan and the policy ask here, so that they cannot disagree. megatron
and vLLM check most of this again, one rule at a time, after processes and groups have started.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

from megatron_rl.config.model_config import ModelSizes
from megatron_rl.config.schema import ParallelConfig, RolloutConfig


def replica_ranks(parallel: ParallelConfig) -> int:
    """Ranks that hold one replica of the policy."""
    return parallel.tensor * parallel.pipeline * parallel.context


def layout_problems(sizes: ModelSizes, parallel: ParallelConfig, world_size: int) -> list[str]:
    """Reasons why a model of ``sizes`` cannot be trained as ``parallel`` says on ``world_size``
    ranks: one message (key, value, remedy) each, none when it fits."""
    return [*world_problems(parallel, world_size), *model_problems(sizes, parallel)]


def undivided(
    key: str, size: int, number: int, what: str, of: str = "the model's"
) -> Iterator[str]:
    """``key``, whose value is ``size``, does not divide ``number``; ``what``: of which things."""
    if number % size:
        yield f"{key} = {size}: does not divide {of} {number} {what}; choose a divisor"


def world_problems(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """The rules that hold for every model."""
    for keys in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
        sizes = [getattr(parallel, key) for key in keys]
        ranks = math.prod(sizes)
        if world_size % ranks:
            product = " x ".join(f"{key} {size}" for key, size in zip(keys, sizes, strict=True))
            yield (
                f"parallel: {product} = {ranks} does not divide the {world_size} processes; start a"
                f" multiple of {ranks} (torchrun --nproc-per-node) or change parallel.*"
            )
    if parallel.sequence and parallel.tensor == 1:
        yield (
            "parallel.sequence = True: splits sequences over the tensor-parallel ranks; set"
            " parallel.tensor > 1, or sequence=false"
        )
    if parallel.pipeline == 1:
        for key in ("virtual_pipeline", "first_stage_layers", "last_stage_layers"):
            value = getattr(parallel, key)
            if value is not None:
                yield f"parallel.{key} = {value}: needs parallel.pipeline > 1; set it to null"
    overlap_works = parallel.distributed_optimizer and parallel.overlap_grad_reduce
    if parallel.overlap_param_gather and not overlap_works:
        yield (
            "parallel.overlap_param_gather = True: needs parallel.distributed_optimizer=true and"
            " parallel.overlap_grad_reduce=true, or set it to false"
        )


def model_problems(sizes: ModelSizes, parallel: ParallelConfig) -> Iterator[str]:
    """The rules that depend on the model."""
    yield from _attention_problems("parallel", parallel.tensor, sizes)
    # What has heads is cut by them over tensor ranks, and by tokens or heads over context ranks.
    if heads := sizes.linear_heads:
        ranks = parallel.tensor * parallel.context
        key = "parallel.tensor * parallel.context"
        yield from undivided(key, ranks, heads, "key heads of linear attention")
    if sizes.num_experts:
        yield from _expert_problems(sizes, parallel)
    else:
        rows = sizes.ffn_hidden_size
        yield from undivided("parallel.tensor", parallel.tensor, rows, "feed-forward rows")
        for key in ("expert", "expert_tensor"):
            if (ranks := getattr(parallel, key)) > 1:
                yield f"parallel.{key} = {ranks}: the model has no experts; set it to 1"
    if parallel.pipeline > 1:
        yield from _stage_problems(sizes, parallel)


def longest_engine_stage(num_layers: int, pipeline: int) -> int:
    """The most layers that a pipeline stage of an engine has."""
    return max(map(len, engine_stages(num_layers, pipeline)))


def engine_stages(num_layers: int, pipeline: int) -> list[range]:
    """Numbers of the layers of each pipeline stage of an engine.

    vLLM gives what is left of an even share to the stages before the last one, one layer each, from
    the end (``get_pp_indices`` in vllm/distributed/utils.py). Example: 10 layers on 4 stages are 2,
    3, 3 and 2.
    """
    each, more = divmod(num_layers, pipeline)
    longer = range(pipeline - 1 - more, pipeline - 1)
    ends = list(accumulate(each + (stage in longer) for stage in range(pipeline)))
    return [range(first, end) for first, end in pairwise([0, *ends])]


def rollout_problems(sizes: ModelSizes, rollout: RolloutConfig) -> Iterator[str]:
    """Reasons why vLLM cannot cut the model over the ranks of a replica."""
    of_heads = list(_attention_problems("rollout", rollout.tensor, sizes))
    yield from of_heads
    # What the tensor ranks cut: an expert, or the dense layer. Whole experts are not cut.
    width = sizes.expert_ffn_hidden_size or sizes.ffn_hidden_size
    if rollout.expert_parallel:
        yield from _whole_expert_problems(sizes, rollout)
        width = sizes.ffn_hidden_size
    if rollout.pipeline > sizes.num_layers:
        layers = sizes.num_layers
        yield f"rollout.pipeline = {rollout.pipeline}: the model has {layers} layers; lower it"
    # One key has one remedy: a divisor of the heads comes first.
    if not of_heads and sizes.linear_heads:
        heads = sizes.linear_heads
        of_heads += undivided(
            "rollout.tensor", rollout.tensor, heads, "key heads of linear attention"
        )
        yield from of_heads
    if not of_heads:
        yield from undivided("rollout.tensor", rollout.tensor, width, "feed-forward rows")


def _whole_expert_problems(sizes: ModelSizes, rollout: RolloutConfig) -> Iterator[str]:
    """Problems of ``rollout.expert_parallel``."""
    key = "rollout.expert_parallel = True"
    if not sizes.num_experts:
        yield f"{key}: the model has no experts; set it to false"
    elif rollout.tensor == 1:
        yield (
            f"{key}: experts are dealt out over the tensor ranks of a replica, and rollout.tensor"
            " = 1; raise that, or set it to false"
        )
    elif rollout.tensor > sizes.num_experts:
        yield (
            f"{key}: the model has {sizes.num_experts} experts for rollout.tensor ="
            f" {rollout.tensor} ranks; choose at most that"
        )


def _attention_problems(section: str, tensor: int, sizes: ModelSizes) -> Iterator[str]:
    """Heads are cut over tensor ranks; key-value heads are cut, or shared by several ranks each.

    In megatron, ranks that share a head hold equal intervals of its query, key and value rows and
    gather them in the forward; in vLLM each holds a copy of the head.
    """
    key = f"{section}.tensor"
    heads = sizes.num_heads
    kv_heads = sizes.num_kv_heads
    if heads % tensor:
        yield from undivided(key, tensor, heads, "attention heads")
    elif kv_heads % tensor and tensor % kv_heads:
        yield (
            f"{key} = {tensor}: neither a divisor nor a multiple of the model's {kv_heads}"
            " key-value heads; choose one that is"
        )
    elif section == "parallel":
        rows = (heads + 2 * kv_heads) * sizes.head_dim
        yield from undivided(key, tensor, rows, "query, key and value rows")


def _expert_problems(sizes: ModelSizes, parallel: ParallelConfig) -> Iterator[str]:
    yield from undivided("parallel.expert", parallel.expert, sizes.num_experts, "experts")
    rows = sizes.expert_ffn_hidden_size
    what = "feed-forward rows of an expert"
    yield from undivided("parallel.expert_tensor", parallel.expert_tensor, rows, what, "the")
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            "parallel.sequence = False: megatron-core needs it for a model with experts on"
            f" parallel.tensor = {parallel.tensor}; set parallel.sequence=true"
        )


def _stage_problems(sizes: ModelSizes, parallel: ParallelConfig) -> Iterator[str]:
    """Layers are cut evenly over the stages whose number is not set: of 28 layers on four stages
    with 4 set for the first and 6 for the last one, 18 over two."""
    ends = _end_layers(parallel)
    middle_layers = sizes.num_layers - sum(ends)
    middle_stages = parallel.pipeline - len(ends)
    even = middle_stages > 0 and middle_layers > 0 and middle_layers % middle_stages == 0
    if not even and (middle_stages or middle_layers):
        remedy = "choose a divisor, or set parallel.first_stage_layers / last_stage_layers"
        if ends:
            remedy = (
                f"change it, parallel.first_stage_layers (now {parallel.first_stage_layers}) or"
                f" parallel.last_stage_layers (now {parallel.last_stage_layers})"
            )
        yield (
            f"parallel.pipeline = {parallel.pipeline}: {middle_layers} of {sizes.num_layers} layers"
            f" do not divide into {middle_stages} stages; {remedy}"
        )
        return
    chunks = parallel.virtual_pipeline or 1
    layers = stage_layers(sizes, parallel)
    if any(count % chunks for count in layers):
        yield (
            f"parallel.virtual_pipeline = {chunks}: does not divide the layers of each stage"
            f" ({', '.join(map(str, layers))}); choose a divisor of them, or null"
        )


def stage_layers(sizes: ModelSizes, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage, all its chunks together, of a layout that fits.

    Example: 28 layers on four stages with ``first_stage_layers`` 4 and ``last_stage_layers`` 6 are
    ``[4, 9, 9, 6]``.
    """
    ends = _end_layers(parallel)
    middle = (sizes.num_layers - sum(ends)) // max(1, parallel.pipeline - len(ends))
    layers = [middle] * parallel.pipeline
    layers[0] = parallel.first_stage_layers or layers[0]
    layers[-1] = parallel.last_stage_layers or layers[-1]
    return layers


def _end_layers(parallel: ParallelConfig) -> list[int]:
    """Layers of the end stages whose number is set."""
    ends = (parallel.first_stage_layers, parallel.last_stage_layers)
    return [layers for layers in ends if layers is not None]
