"""The phases of a step, the memory of each on a rank, and what to change where it does not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.schema import Config
from megatron_rl.planning.engine_memory import GIB, EngineMemory
from megatron_rl.planning.memory import StageMemory, longest_sequence

# Memory in addition to tensors: the CUDA context (about 0.5), NCCL's buffers for the groups of the
# policy, workspaces of matrix products and fragmentation, or the libraries of a process. An
# allowance, not a measurement.
OVERHEAD_GIB = {"cuda": 3.0, "cpu": 1.0}
# What vLLM keeps outside the memory that its sleep gives back: captured CUDA graphs (it leaves them
# by default), the buffers of its own communicators, a workspace of attention (flashinfer's has 394
# MiB). Also an allowance; on a CPU the first one covers it.
ENGINE_KEEPS_GIB = {"cuda": 2.0, "cpu": 0.0}

# Names in StageMemory.
STATES = ("weights", "gradients", "optimizer")
_PASSES = ("activations", "logits")
_IF_ANY = ("teacher", "teacher_copies", "experts")  # shown where there are any
# What wakes for a weight sync, and all of the engine; on a GPU. On a CPU vLLM has another sampler.
_ENGINE_FOR_SYNC = ("engine_weights", "engine_sampler")
ENGINE = (*_ENGINE_FOR_SYNC, "kv_cache")
ENGINE_ON_CPU = ("engine_weights", "kv_cache")
ON_HOST = ("host copies", "checkpoint")  # phases of the host of a CUDA device


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a rank may use, in GiB."""

    kind: Literal["cuda", "cpu"]
    device_gib: float  # of the device; on ``kind`` cpu this rank's share of the host's memory
    host_gib: float | None = None  # the share of the host of a CUDA device; None: not checked


@dataclass(frozen=True)
class Demand:
    """The memory that a phase needs on a rank of its fullest stage, and that there is, in GiB.

    ``has_gib`` None: not known.
    """

    phase: str
    parts: tuple[str, ...]
    stage: StageMemory
    need_gib: float
    has_gib: float | None


def host_copies(config: Config) -> tuple[str, ...]:
    """States that have a copy on the host while they are offloaded.

    Gradients have none: they come back as zeros.
    """
    offload = config.memory.offload
    return tuple(state for state in STATES if state in offload and state != "gradients")


def phases(config: Config, kind: str) -> dict[str, tuple[str, ...]]:
    """The fields of StageMemory that are held in each phase.

    On a CUDA device: while the policy trains, while weights go to the engine, and while it
    generates; on its host: copies at all times, and more while a checkpoint is written or read.
    On a CPU everything at all times, for there nothing leaves by moving; what ``memory.offload``
    names is held twice, and so is what of a checkpoint is still to be written.
    """
    copies = ("reference", "teacher_copies", "experts", *host_copies(config))
    # Without ``background`` the host has two blocks of it at a time, which count as nothing.
    written = ("checkpoint_copy",) if config.checkpoint.background else ()
    if kind == "cpu":
        return {"the run": (*STATES, *_PASSES, "teacher", *ENGINE_ON_CPU, *copies, *written)}
    if config.rollout.sleep_level == 1:
        copies += ("engine_backup",)
    # The reference is written from a second copy, in ordinary memory.
    on_host = {"host copies": copies, "checkpoint": (*copies, "reference", *written)}
    return _device_phases(config) | on_host


def _device_phases(config: Config) -> dict[str, tuple[str, ...]]:
    offload = config.memory.offload
    training = [*STATES, "fp8_copies", *_PASSES, "teacher"]
    generation = [state for state in STATES if state not in offload]
    sync = [state for state in STATES if state in generation or state == "weights"]
    # The caches of layers go with the first state that leaves: weights leave after the weight sync,
    # the others before it.
    if not set(offload) - {"weights"}:
        sync.append("fp8_copies")
    if not offload:
        generation.append("fp8_copies")
    if config.rollout.sleep_level == 0:
        training += ENGINE
        sync += ENGINE
    else:  # an engine that slept wakes its weights for the sync, its cache only afterwards
        sync += _ENGINE_FOR_SYNC
    generation += ENGINE
    if _quantized_at_end(config):
        sync.append("engine_unquantized")
    phases = {"training": training, "weight sync": sync, "generation": generation}
    return {phase: tuple(parts) for phase, parts in phases.items()}


def _quantized_at_end(config: Config) -> bool:
    """Whether a weight sync holds the engine's weights unquantized, next to those that it replaces,
    until its end: the ranks of an engine agree on a scale, and shards of a plan arrive in another
    order on each (engine/weights/worker.py, ``processing_is_collective``)."""
    rollout = config.rollout
    planned = config.sync_method == "reshard"
    return planned and rollout.quantization is not None and rollout.ranks > 1


def overhead_gib(phase: str, kind: str) -> float:
    """The memory held in ``phase`` besides tensors."""
    return 0.0 if phase in ON_HOST else OVERHEAD_GIB[kind] + ENGINE_KEEPS_GIB[kind]


def needed_gib(stage: StageMemory, names: Sequence[str], overhead_gib: float = 0.0) -> float:
    """GiB of the fields ``names`` of a rank."""
    return sum(getattr(stage, name) for name in names) / GIB + overhead_gib


def demands(
    stages: Sequence[StageMemory], config: Config, budget: MemoryBudget
) -> Iterator[Demand]:
    """One for each of ``phases``."""
    for phase, parts in phases(config, budget.kind).items():
        # Another stage in each phase: the first has the embedding, the last logits and the head.
        fullest = max(stages, key=lambda stage: needed_gib(stage, parts))
        need = needed_gib(fullest, parts, overhead_gib(phase, budget.kind))
        has = budget.host_gib if phase in ON_HOST else budget.device_gib
        yield Demand(phase, parts, fullest, need, has)


def describe(stages: Sequence[StageMemory], config: Config, budget: MemoryBudget) -> str:
    """The plan in one line.

    Example: "memory plan of a rank in GiB (pipeline stage 0): weights 3.55, gradients 7.09, ...; in
    all: training 32.10 of 79.10, ...".
    """
    wanted = list(demands(stages, config, budget))
    stage = wanted[0].stage  # the fullest one of the first phase
    counted = {"reference"}.union(*(demand.parts for demand in wanted))
    # The policy's own, then those of its engine.
    names = (*StageMemory.__annotations__, *EngineMemory.__annotations__)
    sizes = [
        f"{name.replace('_', ' ')} {getattr(stage, name) / GIB:.2f}"
        for name in names
        if name in counted and (name not in _IF_ANY or getattr(stage, name))
    ]
    phases = [f"{each.phase} {each.need_gib:.2f}" for each in wanted]
    limits = ["" if each.has_gib is None else f" of {each.has_gib:.2f}" for each in wanted]
    in_all = ", ".join(map(str.__add__, phases, limits))
    return (
        f"memory plan of a rank in GiB (pipeline stage {stage.stage}): {', '.join(sizes)}; in all:"
        f" {in_all}"
    )


def problems(stages: Sequence[StageMemory], config: Config, budget: MemoryBudget) -> list[str]:
    """One message for each phase that does not fit: how much, of what most, which key to change."""
    messages = []
    # Servers have their memory elsewhere.
    if stages[0].kv_cache == 0 and not config.source.is_servers:
        stage = stages[0]
        messages.append(no_cache(stage.engine_weights, stage.engine_sampler, config, budget))
    for demand in demands(stages, config, budget):
        if demand.has_gib is not None and demand.need_gib > demand.has_gib:
            messages.append(_does_not_fit(demand, config))
    return messages


def no_cache(weights: int, sampler: int, config: Config, budget: MemoryBudget) -> str:
    """The message for an engine whose weights and sampler leave no memory for a cache."""
    rollout = config.rollout
    return (
        f"rollout.gpu_memory_utilization = {rollout.gpu_memory_utilization}: of"
        f" {budget.device_gib:.1f} GiB it leaves nothing for keys and values after"
        f" {weights / GIB:.1f} GiB of weights and {sampler / GIB:.1f} GiB"
        f" of the sampler; raise it, or rollout.tensor (now {rollout.tensor}), or"
        f" {_fewer_sequences(config)}"
    )


def _does_not_fit(demand: Demand, config: Config) -> str:
    largest = max(demand.parts, key=lambda name: getattr(demand.stage, name))
    remedies = list(moves(demand, config))
    # Copies on the host shrink with what they are copies of, which the moves say already.
    if demand.phase not in ON_HOST or largest in ("reference", "checkpoint_copy", *_IF_ANY):
        remedies += shrinks(largest, config)
    return (
        f"{demand.phase} needs {demand.need_gib:.1f} GiB on a rank of pipeline stage"
        f" {demand.stage.stage}, there are {demand.has_gib:.1f} GiB; most of it is {largest}"
        f" ({getattr(demand.stage, largest) / GIB:.1f} GiB): {', or '.join(remedies)}"
    )


def moves(demand: Demand, config: Config) -> Iterator[str]:
    """Settings that would remove parts from this phase."""
    offload = config.memory.offload
    level = config.rollout.sleep_level
    if demand.phase in ("weight sync", "generation"):
        # A weight sync reads the weights; those that are kept in FP8 cannot be offloaded at all.
        fp8 = config.precision.fp8
        stay = demand.phase == "weight sync" or (fp8 is not None and fp8.param_gather)
        states = [state for state in STATES if not (stay and state == "weights")]
        if movable := [state for state in states if state in demand.parts]:
            yield f"add {', '.join(movable)} to memory.offload (now {offload})"
    elif demand.phase in (*ON_HOST, "the run") and host_copies(config):
        copies = ", ".join(host_copies(config))
        yield f"take {copies} out of memory.offload (now {offload})"
    if level == 0 and demand.phase in ("training", "weight sync"):
        yield "set rollout.sleep_level=2 (now 0), so that the engine leaves while the policy trains"
    if level == 1 and demand.phase in ON_HOST:
        yield "set rollout.sleep_level=2 (now 1), which drops the engine's weights"


def shrinks(part: str, config: Config) -> Iterator[str]:
    """Settings that would make ``part`` smaller and are not at their best value yet."""
    parallel = config.parallel
    rollout = config.rollout
    if part == "activations":
        yield from _smaller_activations(config)
    elif part == "engine_weights":
        yield f"raise rollout.tensor (now {rollout.tensor})"
    elif part == "engine_unquantized":
        yield "set weight_sync.method=gather (now reshard)"
        yield f"raise rollout.tensor (now {rollout.tensor})"
    elif part == "engine_sampler":
        yield _fewer_sequences(config)
    elif part == "checkpoint_copy":
        yield "set checkpoint.background=false, so that the run waits while its state is written"
        yield "use more data-parallel ranks"
    elif part == "experts":
        yield "use more data-parallel ranks"
        yield "set rollout.router_replay=none"
    elif part == "kv_cache":
        key = "gpu_memory_utilization" if rollout.kv_cache_gib is None else "kv_cache_gib"
        yield f"lower rollout.{key} (now {getattr(rollout, key)})"
    else:
        if part == "optimizer" and parallel.distributed_optimizer:
            yield "use more data-parallel ranks"
        elif part == "optimizer":
            yield "set parallel.distributed_optimizer=true"
        elif part == "reference":
            yield "choose a method without KL to the start"
        elif part in _IF_ANY:
            yield "give a smaller model.teacher"
        yield f"raise parallel.tensor (now {parallel.tensor})"
        if part != "logits":
            yield f"raise parallel.pipeline (now {parallel.pipeline})"


def _fewer_sequences(config: Config) -> str:
    sequences = config.rollout.max_num_seqs
    now = "null, vLLM's choice" if sequences is None else sequences
    return f"lower rollout.max_num_seqs (now {now})"


def _smaller_activations(config: Config) -> Iterator[str]:
    parallel = config.parallel
    tokens = config.batch.tokens_per_microbatch
    if tokens > longest_sequence(config) * config.method.sequences_per_response:
        yield f"lower batch.tokens_per_microbatch (now {tokens})"
    else:
        # A micro-batch has to hold one response.
        yield (
            f"lower rollout.max_response_tokens (now {config.rollout.max_response_tokens}) and"
            f" batch.tokens_per_microbatch (now {tokens})"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield "set parallel.sequence=true"
    if parallel.recompute != "full":
        yield f"set parallel.recompute=full (now {parallel.recompute})"
    yield f"raise parallel.context (now {parallel.context})"
