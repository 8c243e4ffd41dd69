"""The phases of a step, and the memory that each needs on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.schema import Config
from megatron_rl.planning.engine_memory import GIB
from megatron_rl.planning.memory import StageMemory

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
# What wakes for a weight sync, and all of the engine; on a GPU. On a CPU vLLM has another sampler.
_ENGINE_FOR_SYNC = ("engine_weights", "engine_sampler")
ENGINE = (*_ENGINE_FOR_SYNC, "kv_cache")
ENGINE_ON_CPU = ("engine_weights", "kv_cache")
ON_HOST = ("host copies", "checkpoint")  # phases of the host of a CUDA device


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a rank may use, in GiB.

    Attributes:
        device_gib: of the device; on ``kind`` cpu this rank's share of the host's memory.
        host_gib: the share of the host of a CUDA device; None: not checked.
    """

    kind: Literal["cuda", "cpu"]
    device_gib: float
    host_gib: float | None = None


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
    copies = ("reference", *host_copies(config))
    # Without ``background`` the host has two blocks of it at a time, which count as nothing.
    written = ("checkpoint_copy",) if config.checkpoint.background else ()
    if kind == "cpu":
        return {"the run": (*STATES, *_PASSES, *ENGINE_ON_CPU, *copies, *written)}
    if config.rollout.sleep_level == 1:
        copies += ("engine_backup",)
    # The reference is written from a second copy, in ordinary memory.
    on_host = {"host copies": copies, "checkpoint": (*copies, "reference", *written)}
    return _device_phases(config) | on_host


def _device_phases(config: Config) -> dict[str, tuple[str, ...]]:
    offload = config.memory.offload
    training = [*STATES, "fp8_copies", *_PASSES]
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
