"""Device memory of a configuration before anything is built: what each pipeline stage of the policy and its engine will hold.

Weights, gradients and optimizer are exact sums over the parameters of a stage. Activations are what a layer saves for its backward
with fused attention; the engine's share is its weights and its key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import Parameter, expert_parameters, layer_parameters, local_shape, outer_parameters, padded_vocab

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
# Bytes that the CUDA context, communication buffers and fragmentation take beside the tensors.
OVERHEAD_GIB = 4.0


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of pipeline stage ``stage``, by purpose. ``logits``: the live chunk and the head's float32 gradient."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    engine_weights: int
    kv_cache: int


@dataclass(frozen=True)
class Sizes:
    """What decides activations and cache: the longest micro-batch of a data-parallel rank, the logprob chunk, the world."""

    world_size: int
    tokens_per_microbatch: int
    logprob_chunk_tokens: int
    make_vocab_divisible_by: int
    fused: bool  # layers of Transformer Engine


def stage_layers(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage, interleaved chunks together."""
    ends = (parallel.first_stage_layers, parallel.last_stage_layers)
    middle = (arch.num_layers - sum(x or 0 for x in ends)) // max(1, parallel.pipeline - sum(x is not None for x in ends))
    layers = [middle] * parallel.pipeline
    if ends[0] is not None:
        layers[0] = ends[0]
    if ends[1] is not None:
        layers[-1] = ends[1]
    return layers


def parameter_counts(arch: Architecture, parallel: ParallelConfig, divisible_by: int) -> list[tuple[int, int]]:
    """(parameters outside experts, parameters of experts) on one rank of each stage."""
    rows = padded_vocab(arch.vocab_size, divisible_by, parallel.tensor)

    def count(parameters: Iterable[Parameter], size: int) -> int:
        return sum(math.prod(local_shape(parameter, arch, rows, size)) for parameter in parameters)

    before, after = (count(parameters, parallel.tensor) for parameters in outer_parameters(arch))
    layer = count(layer_parameters(arch, 0), parallel.tensor)
    each = count(expert_parameters(arch, 0, 0), parallel.expert_tensor or 1) if arch.num_experts else 0
    found = []
    for stage, layers in enumerate(stage_layers(arch, parallel)):
        last = stage == parallel.pipeline - 1
        dense = layers * layer + (before if stage == 0 else 0) + (after if last else 0)
        if last and stage > 0 and arch.tied_embeddings:
            dense += before  # the last stage has a copy of the embedding as its head
        found.append((dense, layers * each * arch.num_experts // parallel.expert))
    return found


def layer_activations(arch: Architecture, parallel: ParallelConfig, tokens: int, element: int, fused: bool) -> int:
    """Bytes that one layer keeps of ``tokens`` tokens for its backward; ``element``: bytes of a number; ``fused``: layers of
    Transformer Engine (else megatron's own with torch's norm and attention).

    Per token: for each of two norms its input and its output (unfused: the input twice in float32, and the output), queries, keys,
    values and the attention's output (unfused: that twice, and the rotary tables), and 5 feed-forward widths (gate and up, activated
    gate, up once more, their product) for each expert a token visits. Tensor ranks share what they split; with sequence
    parallelism also the norms. Full recomputation keeps the layer's input only.
    """
    tensor = parallel.tensor
    shared = tensor if parallel.sequence else 1
    if parallel.recompute == "full":
        return tokens * arch.hidden_size * element // shared
    norms = 2 * arch.hidden_size * (2 * element if fused else 2 * 4 + element) / shared
    attention = ((2 if fused else 3) * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim / tensor
    attention += 0 if fused else 4 * arch.head_dim
    if arch.num_experts:
        width = 5 * arch.expert_ffn_hidden_size / (parallel.expert_tensor or 1) + 2 * arch.hidden_size
        feed_forward = arch.experts_per_token * width / shared
    else:
        feed_forward = 5 * arch.ffn_hidden_size / tensor
    return int(tokens * (norms + element * (attention + feed_forward)))


def live_layers(parallel: ParallelConfig, stage: int, layers: int) -> int:
    """Layers of ``stage`` times micro-batches whose backward is still to come, at the fullest moment: one forward one backward, or
    the interleaved schedule, which runs ``2 (stages - stage - 1) + (chunks - 1) stages`` chunks ahead."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline or 1
    if chunks == 1:
        return (stages - stage) * layers
    return math.ceil((2 * (stages - stage - 1) + (chunks - 1) * stages + 1) * layers / chunks)


def plan(
    arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig, rollout: RolloutConfig, sizes: Sizes, gpu_gib: float
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage. A null ``rollout.kv_cache_gib`` is what ``gpu_memory_utilization`` leaves."""
    element = BYTES[precision.params]
    gradient = 4 if precision.grad_reduce_in_float32 else element
    moments = 2 * BYTES[precision.adam_moments] + (4 if element == 2 else 0)  # and the float32 master weights
    data = sizes.world_size // (parallel.tensor * parallel.pipeline)  # with context: both share the optimizer's work
    expert_data = sizes.world_size // ((parallel.expert_tensor or 1) * parallel.expert * parallel.pipeline)
    tokens = sizes.tokens_per_microbatch // parallel.context
    rows = padded_vocab(arch.vocab_size, sizes.make_vocab_divisible_by, parallel.tensor) // parallel.tensor
    counts = parameter_counts(arch, parallel, sizes.make_vocab_divisible_by)
    engine = {"tensor": rollout.tensor, "expert_tensor": rollout.tensor, "pipeline": 1, "expert": 1}
    whole = ParallelConfig(**{**parallel.model_dump(), **engine, "first_stage_layers": None, "last_stage_layers": None})
    engine_weights = sum(parameter_counts(arch, whole, 1)[0]) * BYTES[rollout.dtype]
    cache = rollout.gpu_memory_utilization * gpu_gib * GIB - engine_weights if rollout.kv_cache_gib is None else rollout.kv_cache_gib * GIB
    found = []
    for stage, ((dense, experts), layers) in enumerate(zip(counts, stage_layers(arch, parallel), strict=True)):
        if parallel.distributed_optimizer:
            states = moments * (math.ceil(dense / data) + math.ceil(experts / expert_data))
        else:
            states = moments * (dense + experts)
        activations = live_layers(parallel, stage, layers) * layer_activations(arch, parallel, tokens, element, sizes.fused)
        if parallel.recompute == "full":
            once = ParallelConfig(**{**parallel.model_dump(), "recompute": "none"})
            activations += layer_activations(arch, once, tokens, element, sizes.fused)
        last = stage == parallel.pipeline - 1
        logits = 4 * rows * (min(sizes.logprob_chunk_tokens, tokens) + arch.hidden_size) if last else 0
        found.append(
            StageMemory(
                stage=stage, weights=(dense + experts) * element, gradients=(dense + experts) * gradient, optimizer=states,
                activations=activations, logits=logits, engine_weights=engine_weights, kv_cache=max(0, int(cache)),
            )
        )  # fmt: skip
    return found


KNOBS = {
    "weights": "parallel.tensor or parallel.pipeline",
    "gradients": "parallel.tensor or parallel.pipeline",
    "optimizer": "parallel.distributed_optimizer=true, or more data-parallel ranks",
    "activations": "batch.tokens_per_microbatch, parallel.sequence=true, parallel.context or parallel.recompute=full",
    "logits": "parallel.tensor",
    "engine_weights": "rollout.tensor",
    "kv_cache": "rollout.kv_cache_gib or rollout.gpu_memory_utilization",
}


def phases(sleep_level: int, offloaded: Sequence[str]) -> dict[str, list[str]]:
    """Which parts of StageMemory are on the device while the policy trains and while the engine generates."""
    states = ["weights", "gradients", "optimizer"]
    engine = ["engine_weights", "kv_cache"]
    training = [*states, "activations", "logits", *([] if sleep_level > 0 else engine)]
    return {"training": training, "rollout": [name for name in states if name not in offloaded] + engine}


def problems(stages: Sequence[StageMemory], gpu_gib: float, sleep_level: int, offloaded: Sequence[str] = ()) -> list[str]:
    """One message for the fullest stage of each phase that does not fit: how much, of what most, which key to change."""
    found = []
    for phase, names in phases(sleep_level, offloaded).items():
        worst = max(stages, key=lambda stage: sum(getattr(stage, name) for name in names))
        need = sum(getattr(worst, name) for name in names) / GIB + OVERHEAD_GIB
        if need > gpu_gib:
            largest = max(names, key=lambda name: getattr(worst, name))
            found.append(
                f"{phase} on pipeline stage {worst.stage} needs {need:.1f} GiB of {gpu_gib:.1f}; most of it is {largest} "
                f"({getattr(worst, largest) / GIB:.1f} GiB): change {KNOBS[largest]}"
            )
    return found
