"""Parameter counts of a rank over the parameter map: exact, and without a tensor."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from megatron_rl.config.rules.layout_rules import engine_stages, stage_layers
from megatron_rl.config.schema import ParallelConfig, RolloutConfig
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    VISION,
    Parameter,
    adapter_parameters,
    expert_parameters,
    layer_parameters,
    local_shape,
    outer_parameters,
    padded_vocab,
    vision_parameters,
)

Which = Callable[[Parameter], bool]


class Counts(NamedTuple):
    """Parameters on one rank, apart because their optimizer states are spread over other groups."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def is_trained(parameter: Parameter, arch: Architecture, freeze_vision: bool) -> bool:
    """Whether it has a gradient and an optimizer state."""
    if arch.adapter_slots:
        return parameter.is_adapter
    return not (freeze_vision and parameter.slot.megatron.startswith(VISION))


def is_cut_by_engine(parameter: Parameter) -> bool:
    """Whether vLLM cuts this parameter of the tower over tensor ranks: the matrices of its blocks
    and of its end."""
    name = parameter.slot.megatron
    is_matrix = name.endswith(".weight") and "norm" not in name and "ln_q" not in name
    return is_matrix and not name.startswith((VISION + "patch_embed", VISION + "pos_embed"))


def is_layer_matrix(parameter: Parameter) -> bool:
    """Whether FP8 is for it: not embedding, head, norms, biases and routers."""
    kinds = ("qkv", "gate_up", "columns")  # FP8 is refused with linear attention
    return parameter.slot.kind in kinds and not parameter.slot.megatron.endswith("bias")


def stage_counts(
    arch: Architecture,
    parallel: ParallelConfig,
    divisible_by: int,
    which: Which = lambda _: True,
) -> list[Counts]:
    """The counts of a rank of each pipeline stage, of the parameters that ``which`` takes."""
    rows = padded_vocab(arch.vocab_size, divisible_by, parallel.tensor)

    def count(parameters: Iterable[Parameter], cuts: int = parallel.tensor) -> int:
        shapes = (local_shape(each, arch, rows, cuts) for each in parameters if which(each))
        return sum(math.prod(shape) for shape in shapes)

    before, after = outer_parameters(arch)
    embedding = count(before)
    of_kind = {arch.kind(layer): layer for layer in range(arch.num_layers)}
    sizes = {
        kind: count(layer_parameters(arch, n) + adapter_parameters(arch, n))
        for kind, n in of_kind.items()
    }
    expert = count(expert_parameters(arch, 0, 0), parallel.expert_tensor)
    counts = []
    for stage, layers in enumerate(layers_of_stages(arch, parallel)):
        is_first = stage == 0
        is_last = stage == parallel.pipeline - 1
        with_experts = sum(map(arch.has_experts, layers))
        dense = sum(sizes[arch.kind(layer)] for layer in layers)
        if is_first:
            dense += count(vision_parameters(arch)) + embedding
        if is_last:
            dense += count(after)
            if arch.tied_embeddings and not is_first:
                dense += embedding  # a copy of the embedding is the last stage's head
        counts.append(Counts(dense, with_experts * expert * arch.num_experts // parallel.expert))
    return counts


def layers_of_stages(arch: Architecture, parallel: ParallelConfig) -> list[list[int]]:
    """Numbers of the layers of each pipeline stage.

    Example: of 8 layers the first of two stages with two chunks each has 0, 1, 4 and 5.
    """
    chunks = parallel.virtual_pipeline or 1
    found: list[list[int]] = [[] for _ in range(parallel.pipeline)]
    numbers = iter(range(arch.num_layers))
    for _ in range(chunks):
        for stage, layers in zip(found, stage_layers(arch, parallel), strict=True):
            stage += islice(numbers, layers // chunks)
    return found


def engine_parameters(
    arch: Architecture, rollout: RolloutConfig
) -> Iterator[tuple[Parameter, int, int]]:
    """What a rank of the engine's longest pipeline stage holds: (parameter, numbers of its tensor
    there, how many such tensors, one a layer).

    Embedding, tower and head are counted on every stage: some of vLLM's models build them there
    (Qwen3-MoE does). The experts of a layer are one tensor for each of its two kinds.
    """
    tensor = rollout.tensor
    rows = padded_vocab(arch.vocab_size, 1, tensor)

    def numbers(parameter: Parameter, cuts: int) -> int:
        return math.prod(local_shape(parameter, arch, rows, cuts))

    before, after = outer_parameters(arch)
    for parameter in (*before, *after):
        yield parameter, numbers(parameter, tensor), 1
    for parameter in vision_parameters(arch):
        # The map gives the tower whole: of what the engine cuts a rank has its share.
        ranks = tensor if is_cut_by_engine(parameter) else 1
        yield parameter, math.ceil(numbers(parameter, tensor) / ranks), 1
    stages = engine_stages(arch.num_layers, rollout.pipeline)
    longest = max(stages, key=lambda stage: (len(stage), stage.start))
    copies_of = Counter(map(arch.kind, longest))
    for kind, layer in {arch.kind(layer): layer for layer in longest}.items():
        for parameter in layer_parameters(arch, layer):
            yield parameter, numbers(parameter, tensor), copies_of[kind]
    copies, cuts = arch.num_experts, tensor
    if rollout.expert_parallel:
        copies, cuts = math.ceil(arch.num_experts / tensor), 1
    for parameter in expert_parameters(arch, 0, 0):
        yield parameter, copies * numbers(parameter, cuts), sum(map(arch.has_experts, longest))
