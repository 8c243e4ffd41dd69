"""The shards that every rank of a training layout will hold, for machines one does not have: the
parameter map, and Megatron's order of ranks and layers. No process group, no tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_rl.config.load import compose
from megatron_rl.config.rules.layout_rules import layout_problems, stage_layers
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models.base import Architecture
from megatron_rl.models.parameter_map import (
    TIED_HEAD,
    Parameter,
    expert_parameters,
    layer_parameters,
    outer_parameter,
    outer_parameters,
    padded_vocab,
    shards,
    vision_parameters,
)
from megatron_rl.weight_sync.planner.shards import ShardGroup, apart
from tools.planning.engine_tables import RolloutLayout
from tools.planning.shard_table import full_names

# Short names, as planners write layouts -> keys of the configuration.
SHORT_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",  # these two are not keys of ``parallel``
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "vpp": "virtual_pipeline",
    "first_layers": "first_stage_layers",
    "last_layers": "last_stage_layers",
    "vocab_multiple": "vocab_multiple",
}
ROLLOUT_SIZES = ("tp", "pp", "dp", "ep", "vocab_multiple")


@dataclass(frozen=True)
class TrainingLayout:
    """``parallel`` over ``world_size`` ranks; the vocabulary is padded to a multiple of
    ``vocab_multiple`` times the tensor-parallel size."""

    parallel: ParallelConfig
    world_size: int
    vocab_multiple: int = 128
    dtype: str = "bfloat16"

    @property
    def stage_ranks(self) -> int:
        return self.world_size // self.parallel.pipeline


def parse_sizes(known: Collection[str], flag: str, text: str) -> dict[str, int]:
    """``"tp=8,pp=4"`` as a dictionary. Raises ValueError naming an unknown size or a value that is
    no positive integer."""
    values: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        # Not ``isdigit``, which takes superscripts as well.
        is_size = value.isdecimal() and int(value) >= 1
        if name not in known or name in values or not is_size:
            raise ValueError(
                f"{flag}: {item!r} is not one of {', '.join(known)} with a positive whole number,"
                " each once"
            )
        values[name] = int(value)
    return values


def parse_training(flag: str, text: str) -> TrainingLayout:
    """The training layout in short names. Example: ``tp=8,pp=4,dp=2``."""
    sizes = parse_sizes(SHORT_NAMES, flag, text)
    data_parallel = sizes.pop("dp", 1)
    vocab_multiple = sizes.pop("vocab_multiple", 128)
    changes = {SHORT_NAMES[name]: size for name, size in sizes.items()}
    changes["sequence"] = sizes.get("tp", 1) > 1  # as models with experts need it; moves no weight
    parallel = ParallelConfig.model_validate(compose("parallel/single") | changes)
    ranks = parallel.tensor * parallel.context * parallel.pipeline * data_parallel
    return TrainingLayout(parallel, ranks, vocab_multiple)


def parse_rollout(flag: str, text: str) -> RolloutLayout:
    """The layout of the engines. Example: ``tp=8,dp=8``."""
    return RolloutLayout(**parse_sizes(ROLLOUT_SIZES, flag, text))


@dataclass(frozen=True)
class Place:
    """A rank in the groups of the policy."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int


def place_of(layout: TrainingLayout, rank: int) -> Place:
    """Megatron's default order, fastest first: tensor, context, data, pipeline for dense
    parameters; expert tensor, expert, expert data, pipeline for experts.

    Example: of 8 ranks with tensor 2 and expert 4, rank 5 is tensor rank 1, expert rank 1 (of the
    second data-parallel copy) and, with expert_tensor 1, expert tensor rank 0.
    """
    parallel = layout.parallel
    stage, inner = divmod(rank, layout.stage_ranks)
    expert_tensor = parallel.expert_tensor
    return Place(
        stage,
        tensor=inner % parallel.tensor,
        expert=inner // expert_tensor % parallel.expert,
        expert_tensor=inner % expert_tensor,
    )


def check_layout(arch: Architecture, layout: TrainingLayout) -> None:
    """Raises ValueError where a run would refuse the layout, with the same words."""
    problems = layout_problems(arch, layout.parallel, layout.world_size)
    if problems:
        raise ValueError("train layout: " + "; ".join(problems))


def stage_chunks(arch: Architecture, parallel: ParallelConfig, stage: int) -> list[range]:
    """Global numbers of the layers of each model chunk of a stage: chunk after chunk, layers are
    dealt out to the stages in turn.

    Example: 8 layers over 2 stages in 2 chunks: stage 0 has layers 0, 1 and 4, 5.
    """
    num_chunks = parallel.virtual_pipeline or 1
    sizes = [size // num_chunks for size in stage_layers(arch, parallel)]
    chunks = []
    for chunk in range(num_chunks):
        first = chunk * sum(sizes) + sum(sizes[:stage])
        chunks.append(range(first, first + sizes[stage]))
    return chunks


def training_shards(arch: Architecture, layout: TrainingLayout, rank: int) -> list[ShardGroup]:
    """What a Megatron rank holds; keys are ``<chunk>:<name in the GPTModel>``. Raises ValueError
    for a layout that does not fit the architecture."""
    check_layout(arch, layout)
    parallel = layout.parallel
    held = _Held(arch, layout, place_of(layout, rank))
    before, after = outer_parameters(arch)
    if arch.tied_embeddings and parallel.pipeline > 1:  # the last stage has a copy
        after.append(outer_parameter(TIED_HEAD, arch))
    chunks = stage_chunks(arch, parallel, held.place.stage)
    if held.place.stage == 0:
        held.outside_layers(0, [*vision_parameters(arch), *before])
    for chunk, layers in enumerate(chunks):
        held.layers(chunk, layers)
    if held.place.stage == parallel.pipeline - 1:
        held.outside_layers(len(chunks) - 1, after)
    return held.groups


class _Held:
    """The groups of one rank. All layers of a chunk are alike: the shards are those of its first
    layer, under the names of all."""

    def __init__(self, arch: Architecture, layout: TrainingLayout, place: Place) -> None:
        self.arch = arch
        self.parallel = layout.parallel
        self.place = place
        self.dtype = layout.dtype
        self.vocab_rows = padded_vocab(
            arch.vocab_size, layout.vocab_multiple, layout.parallel.tensor
        )
        self.groups: list[ShardGroup] = []

    def outside_layers(self, chunk: int, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            self._add(parameter, parameter.slot.megatron, "", ("",), (f"{chunk}:",))

    def layers(self, chunk: int, layers: range) -> None:
        """Those of a chunk, kind after kind: first the ones without experts."""
        kind = self.arch.kind
        for each in sorted(set(map(kind, layers))):
            self._alike(chunk, layers.start, [layer for layer in layers if kind(layer) == each])

    def _alike(self, chunk: int, start: int, layers: Sequence[int]) -> None:
        """Layers of a chunk, whose first one is ``start``, that have the same tensors."""
        first = f"model.layers.{layers[0]}."
        tensors = tuple(f"model.layers.{layer}." for layer in layers)
        parameters = tuple(f"{chunk}:decoder.layers.{layer - start}." for layer in layers)
        for parameter in layer_parameters(self.arch, layers[0]):
            self._add(parameter, parameter.slot.megatron, first, tensors, parameters)
        count = self.arch.num_experts // self.parallel.expert
        for i in range(count if self.arch.has_experts(layers[0]) else 0):
            expert = self.place.expert * count + i
            for parameter in expert_parameters(self.arch, layers[0], expert):
                key = f"mlp.experts.local_experts.{i}.{parameter.slot.megatron}"
                self._add(parameter, key, first, tensors, parameters)

    def _add(
        self,
        parameter: Parameter,
        key: str,
        first: str,
        tensors: tuple[str, ...],
        parameters: tuple[str, ...],
    ) -> None:
        """``first``: the prefix, among ``tensors``, under which the shards are computed."""
        rank = self.place.tensor
        size = self.parallel.tensor
        if parameter.expert is not None:
            rank = self.place.expert_tensor
            size = self.parallel.expert_tensor
        keys = full_names(parameters, key)
        held = shards(parameter, self.arch, self.vocab_rows, rank, size)
        for shard in chain.from_iterable(map(apart, held)):
            names = full_names(tensors, shard.name.removeprefix(first))
            dtype = "float32" if parameter.is_buffer else self.dtype
            self.groups.append(ShardGroup(names, keys, replace(shard, name="", dtype=dtype)))
