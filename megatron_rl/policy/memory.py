"""Device memory of a configuration before anything is built: what each pipeline stage of the policy and its engine will hold.

Weights, gradients and optimizer are exact sums over the parameters of a stage. Activations are what a layer saves for its backward
with fused attention; the engine's share is its weights (in ``rollout.dtype``, with ``rollout.quantization`` the matrices of its
layers in one byte) and its key-value cache. FP8 layers of the policy keep bfloat16 weights and copies of them in FP8. Page-locked copies
of the policy count exactly: they are made in pieces, which lose less than 128 KiB for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megatron_rl.config.schema import Config, ParallelConfig, PrecisionConfig, RolloutConfig
from megatron_rl.policy.copies import CHECKPOINT_BYTES, engine_backup_bytes, fp8_copy_bytes, is_layer_matrix
from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import Parameter, expert_parameters, layer_parameters, local_shape, outer_parameters, padded_vocab
from megatron_rl.policy.logprobs import LOGPROB_CHUNK_TOKENS

BYTES = {"float32": 4, "bfloat16": 2}
QUANTIZED_BYTES = 1
GIB = 2**30
# What comes beside the tensors: the CUDA context (about 0.5), NCCL's buffers for the groups of the policy, workspaces of matrix products
# and fragmentation, or the libraries of a process. An allowance, not a measurement.
OVERHEAD_GIB = {"cuda": 3.0, "cpu": 1.0}
# What vLLM keeps outside the memory that its sleep gives back: captured CUDA graphs (it leaves them by default), the buffers of its own
# communicators, a workspace of attention (flashinfer's has 394 MiB). Also an allowance; on a CPU the first one holds it.
ENGINE_KEEPS_GIB = {"cuda": 2.0, "cpu": 0.0}


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of pipeline stage ``stage``, by purpose. ``logits``: the live chunk and the head's float32 gradient;
    ``reference``: the starting weights, which are kept on the host (a pass with them borrows the gradients' memory); ``fp8_copies``
    and ``engine_backup``: see copies.py; ``whole_optimizer``: of a distributed optimizer, which a checkpoint gathers on the host."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    engine_weights: int
    kv_cache: int
    reference: int
    fp8_copies: int
    engine_backup: int
    whole_optimizer: int


@dataclass(frozen=True)
class Sizes:
    """What decides activations and cache: the largest micro-batch of a data-parallel rank, the minibatch (all its sequences at their
    longest), the logprob chunk, the world."""

    world_size: int
    tokens_per_microbatch: int
    tokens_per_minibatch: int
    logprob_chunk_tokens: int
    make_vocab_divisible_by: int
    fused: bool  # layers of Transformer Engine
    keep_reference: bool = False


@dataclass(frozen=True)
class Room:
    """What a rank may use, in GiB. On ``kind`` cpu the device is this rank's share of the host's memory; ``host_gib``: that share
    beside a CUDA device (None: not looked at)."""

    kind: Literal["cuda", "cpu"]
    device_gib: float
    host_gib: float | None = None


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


def parameter_counts(
    arch: Architecture, parallel: ParallelConfig, divisible_by: int, which: Callable[[Parameter], bool] = lambda _: True
) -> list[tuple[int, int]]:
    """(parameters outside experts, parameters of experts) on one rank of each stage, of those ``which`` takes."""
    rows = padded_vocab(arch.vocab_size, divisible_by, parallel.tensor)

    def count(parameters: Iterable[Parameter], size: int) -> int:
        return sum(math.prod(local_shape(parameter, arch, rows, size)) for parameter in parameters if which(parameter))

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


def sizes(config: Config, world_size: int, *, fused: bool, keep_reference: bool) -> Sizes:
    """The sizes of a run of ``config``. A micro-batch has at most one sequence more than a data-parallel rank's even share of a
    minibatch, for sequences are spread over the ranks by their tokens."""
    batch, parallel = config.batch, config.parallel
    data = world_size // (parallel.tensor * parallel.pipeline * parallel.context)
    sequences, longest = batch.prompts_per_minibatch * batch.responses_per_prompt, longest_sequence(config)
    return Sizes(
        world_size=world_size, tokens_per_minibatch=sequences * longest,
        tokens_per_microbatch=min(batch.tokens_per_microbatch, min(sequences, math.ceil(sequences / data) + 1) * longest),
        logprob_chunk_tokens=LOGPROB_CHUNK_TOKENS, make_vocab_divisible_by=config.model.make_vocab_divisible_by, fused=fused,
        keep_reference=keep_reference,
    )  # fmt: skip


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def engine_weight_bytes(arch: Architecture, parallel: ParallelConfig, rollout: RolloutConfig) -> int:
    """Bytes of the engine's weights on one of its ranks."""
    engine = {"tensor": rollout.tensor, "expert_tensor": rollout.tensor, "pipeline": 1, "expert": 1}
    whole = ParallelConfig(**{**parallel.model_dump(), **engine, "first_stage_layers": None, "last_stage_layers": None})
    element = BYTES[rollout.dtype]
    weights = sum(parameter_counts(arch, whole, 1)[0]) * element
    if rollout.quantization is not None:
        weights -= sum(parameter_counts(arch, whole, 1, is_layer_matrix)[0]) * (element - QUANTIZED_BYTES)
    return weights


def plan(
    arch: Architecture, parallel: ParallelConfig, precision: PrecisionConfig, rollout: RolloutConfig, sizes: Sizes, gpu_gib: float
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage. A null ``rollout.kv_cache_gib`` is what ``gpu_memory_utilization`` leaves."""
    element = BYTES[precision.params]
    gradient = 4 if precision.grad_reduce_in_float32 else element
    moments = 2 * BYTES[precision.adam_moments] + (4 if element == 2 else 0)  # and the float32 master weights
    data = sizes.world_size // (parallel.tensor * parallel.pipeline)  # with context: both share the optimizer's work
    expert_data = sizes.world_size // ((parallel.expert_tensor or 1) * parallel.expert * parallel.pipeline)
    tokens, minibatch_tokens = (math.ceil(n / parallel.context) for n in (sizes.tokens_per_microbatch, sizes.tokens_per_minibatch))
    rows = padded_vocab(arch.vocab_size, sizes.make_vocab_divisible_by, parallel.tensor) // parallel.tensor
    counts = parameter_counts(arch, parallel, sizes.make_vocab_divisible_by)
    matrices = parameter_counts(arch, parallel, sizes.make_vocab_divisible_by, is_layer_matrix)
    layers_of = stage_layers(arch, parallel)
    engine_weights = engine_weight_bytes(arch, parallel, rollout)
    engine_element = BYTES[rollout.dtype]
    quantized = engine_element if rollout.quantization is None else QUANTIZED_BYTES
    backup = engine_backup_bytes(arch, rollout, engine_element, quantized)
    cache = rollout.gpu_memory_utilization * gpu_gib * GIB - engine_weights if rollout.kv_cache_gib is None else rollout.kv_cache_gib * GIB
    found = []
    for stage, ((dense, experts), layers) in enumerate(zip(counts, layers_of, strict=True)):
        if parallel.distributed_optimizer:
            states = moments * (math.ceil(dense / data) + math.ceil(experts / expert_data))
        else:
            states = moments * (dense + experts)
        live = live_layers(parallel, stage, layers) * layer_activations(arch, parallel, tokens, element, sizes.fused)
        activations = min(live, layers * layer_activations(arch, parallel, minibatch_tokens, element, sizes.fused))
        if parallel.recompute == "full":
            once = ParallelConfig(**{**parallel.model_dump(), "recompute": "none"})
            activations += layer_activations(arch, once, tokens, element, sizes.fused)
        last = stage == parallel.pipeline - 1
        logits = 4 * rows * (min(sizes.logprob_chunk_tokens, tokens) + arch.hidden_size) if last else 0
        found.append(
            StageMemory(
                stage=stage, weights=(dense + experts) * element, gradients=(dense + experts) * gradient, optimizer=states,
                activations=activations, logits=logits, engine_weights=engine_weights, kv_cache=max(0, int(cache)),
                reference=(dense + experts) * element if sizes.keep_reference else 0,
                fp8_copies=fp8_copy_bytes(sum(matrices[stage]), stage, layers_of, precision), engine_backup=backup,
                whole_optimizer=CHECKPOINT_BYTES * (dense + experts) if parallel.distributed_optimizer else 0,
            )
        )  # fmt: skip
    return found


STATES = ("weights", "gradients", "optimizer")
ENGINE = ("engine_weights", "kv_cache")


def host_copies(config: Config) -> tuple[str, ...]:
    """Parts that have a copy on the host while they are offloaded."""
    return tuple(part for part in STATES if part in config.memory.offload and part != "gradients")  # those come back as zeros


def phases(config: Config, kind: str) -> dict[str, tuple[str, ...]]:
    """Which parts of StageMemory are held at a time: on a CUDA device while the policy trains, while weights go to the engine and
    while it generates, and on the host: copies at all times, and more while a checkpoint is written or read. On a CPU everything at
    all times, for there nothing leaves by moving; what ``memory.offload`` names is held twice. (A checkpoint is written there when no
    activations are held, and is not counted.)
    """
    offload, level = config.memory.offload, config.rollout.sleep_level
    copies = host_copies(config)
    passes = ("activations", "logits")
    if kind == "cpu":
        return {"the run": (*STATES, *passes, *ENGINE, "reference", *copies)}
    kept = tuple(part for part in STATES if part not in offload)
    present = ENGINE if level == 0 else ()
    # FP8 copies go with the first part that leaves: weights after the weight sync, the others before it.
    fp8_in_sync = () if set(offload) - {"weights"} else ("fp8_copies",)
    fp8_beside = () if offload else ("fp8_copies",)
    on_host = ("reference", *copies, *(("engine_backup",) if level == 1 else ()))
    return {
        "training": (*STATES, "fp8_copies", *passes, *present),
        "weight sync": (*(part for part in STATES if part in kept or part == "weights"), *fp8_in_sync, *(present or ENGINE[:1])),
        "generation": (*kept, *fp8_beside, *ENGINE),
        "host copies": on_host,
        "checkpoint": (*on_host, "reference", "whole_optimizer"),  # the reference once more, in ordinary memory
    }


ON_HOST = ("host copies", "checkpoint")  # phases beside a CUDA device


def overhead_gib(phase: str, kind: str) -> float:
    """What is held in ``phase`` beside the tensors."""
    return 0.0 if phase in ON_HOST else OVERHEAD_GIB[kind] + ENGINE_KEEPS_GIB[kind]


def needed_gib(stage: StageMemory, names: Sequence[str], overhead_gib: float = 0.0) -> float:
    """GiB of the parts ``names`` of a rank."""
    return sum(getattr(stage, name) for name in names) / GIB + overhead_gib


@dataclass(frozen=True)
class Demand:
    """What a phase asks of a rank of its fullest stage and what that rank has (None: not known), in GiB."""

    phase: str
    parts: tuple[str, ...]
    stage: StageMemory
    need_gib: float
    has_gib: float | None


def demands(stages: Sequence[StageMemory], config: Config, room: Room) -> Iterator[Demand]:
    """One for each of ``phases``."""
    for phase, parts in phases(config, room.kind).items():
        fullest = max(stages, key=lambda stage: needed_gib(stage, parts))
        need = needed_gib(fullest, parts, overhead_gib(phase, room.kind))
        yield Demand(phase, parts, fullest, need, room.host_gib if phase in ON_HOST else room.device_gib)


def describe(stages: Sequence[StageMemory], config: Config, room: Room) -> str:
    """The plan in one line.

    Example: "memory plan of a rank in GiB (pipeline stage 0): weights 3.55, gradients 7.09, ...; in all: training 32.10 of 79.10, ...".
    """
    found = list(demands(stages, config, room))
    stage = found[0].stage
    counted = {part for one in found for part in one.parts} | {"reference"}
    names = [field.name for field in fields(stage) if field.name in counted]
    parts = ", ".join(f"{name.replace('_', ' ')} {getattr(stage, name) / GIB:.2f}" for name in names)
    phase = ", ".join(f"{one.phase} {one.need_gib:.2f}" + (f" of {one.has_gib:.2f}" if one.has_gib is not None else "") for one in found)
    return f"memory plan of a rank in GiB (pipeline stage {stage.stage}): {parts}; in all: {phase}"


def problems(stages: Sequence[StageMemory], config: Config, room: Room) -> list[str]:
    """One message for each phase that does not fit: how much, of what most, which key to change."""
    found = []
    if stages[0].kv_cache == 0:
        engine, share = stages[0].engine_weights / GIB, config.rollout.gpu_memory_utilization
        found.append(
            f"rollout.gpu_memory_utilization = {share}: of {room.device_gib:.1f} GiB it leaves nothing for keys and values beside "
            f"{engine:.1f} GiB of weights; raise it, or rollout.tensor (now {config.rollout.tensor})"
        )
    for one in demands(stages, config, room):
        if one.has_gib is None or one.need_gib <= one.has_gib:
            continue
        largest = max(one.parts, key=lambda name: getattr(one.stage, name))
        remedies = list(leaving(one, config))
        if one.phase not in ON_HOST or largest in ("reference", "whole_optimizer"):
            remedies += knobs(largest, config)
        found.append(
            f"{one.phase} needs {one.need_gib:.1f} GiB on a rank of pipeline stage {one.stage.stage}, there are {one.has_gib:.1f} GiB; "
            f"most of it is {largest} ({getattr(one.stage, largest) / GIB:.1f} GiB): {', or '.join(remedies)}"
        )
    return found


def leaving(one: Demand, config: Config) -> Iterator[str]:
    """What would take parts out of the phase ``one``."""
    offload, level, fp8 = config.memory.offload, config.rollout.sleep_level, config.precision.fp8
    if one.phase in ("weight sync", "generation"):
        stays = "weights" if one.phase == "weight sync" or (fp8 is not None and fp8.param_gather) else None
        if parts := [part for part in STATES if part in one.parts and part != stays]:
            yield f"add {', '.join(parts)} to memory.offload (now {offload})"
    elif one.phase in (*ON_HOST, "the run") and (copies := host_copies(config)):
        yield f"take {', '.join(copies)} out of memory.offload (now {offload})"
    if level == 0 and one.phase in ("training", "weight sync"):
        yield "set rollout.sleep_level=2 (now 0), so that the engine leaves while the policy trains"
    if level == 1 and one.phase in ON_HOST:
        yield "set rollout.sleep_level=2 (now 1), which drops the engine's weights"


def knobs(part: str, config: Config) -> Iterator[str]:
    """What would make ``part`` smaller: keys that are not at their best value yet."""
    parallel, rollout, tokens = config.parallel, config.rollout, config.batch.tokens_per_microbatch
    if part == "activations":
        if tokens > longest_sequence(config):
            yield f"lower batch.tokens_per_microbatch (now {tokens})"
        else:
            yield f"lower rollout.max_response_tokens (now {rollout.max_response_tokens}) and batch.tokens_per_microbatch (now {tokens})"
        if parallel.tensor > 1 and not parallel.sequence:
            yield "set parallel.sequence=true"
        if parallel.recompute != "full":
            yield f"set parallel.recompute=full (now {parallel.recompute})"
        yield f"raise parallel.context (now {parallel.context})"
    elif part == "engine_weights":
        yield f"raise rollout.tensor (now {rollout.tensor})"
    elif part == "kv_cache":
        key = "gpu_memory_utilization" if rollout.kv_cache_gib is None else "kv_cache_gib"
        yield f"lower rollout.{key} (now {getattr(rollout, key)})"
    else:
        if part == "optimizer":
            yield "use more data-parallel ranks" if parallel.distributed_optimizer else "set parallel.distributed_optimizer=true"
        if part == "reference":
            yield "choose a method without KL to the start"
        yield f"raise parallel.tensor (now {parallel.tensor})"
        if part != "logits":
            yield f"raise parallel.pipeline (now {parallel.pipeline})"
