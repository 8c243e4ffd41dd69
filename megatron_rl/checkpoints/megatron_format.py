"""megatron's distributed checkpoint format, read tensor by tensor, without megatron.

The format does not depend on the parallel layout: a tensor of all layers (and all experts) is one
array ``[layers, experts, ...]`` under one key, stored in chunks; a loader takes those it needs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoints.chunks import ArrayLocation, Box
from megatron_rl.checkpoints.part_reader import PartReader
from megatron_rl.checkpoints.safe_load import read_index
from megatron_rl.models import Architecture
from megatron_rl.models.parameter_map import (
    EMBEDDING,
    HEAD,
    Parameter,
    fused_norms,
    local_shape,
    model_parameters,
    part_of,
    shards,
    tensor_slices,
)

# Norms are stored under their fused names. In front of experts Transformer Engine does not fuse,
# while megatron's own layers look for the fused name there too: that norm is stored under both.
BEFORE_EXPERTS = "pre_mlp_layernorm.weight"

# A NeMo 2 checkpoint has weights of this format. Every key begins with the prefix.
NEMO_WEIGHTS = "weights"
NEMO_PREFIX = "module."


@dataclass(frozen=True)
class LayerTensor:
    """One parameter of one layer (and expert): ``array[key][place]`` has ``shape``.

    ``other_key``: where other writers put it; with ``both`` a writer puts it there too.
    """

    parameter: Parameter
    key: str
    other_key: str
    place: tuple[int, ...]
    extent: tuple[int, ...]  # of the axes that ``place`` indexes
    shape: tuple[int, ...]
    both: bool = False

    def location(self, key: str, dtype: torch.dtype) -> ArrayLocation:
        """Its place in the array ``[layers, experts, ...]``: of one layer and expert, all."""
        whole, corner, boxes = self.extent + self.shape, (0,) * len(self.shape), []
        for part in self.parameter.slot.parts:  # arrays of their own, one after the other
            shape = (part.groups * part.rows, *self.shape[1:])
            first = sum(math.prod(box.sizes) for box in boxes)
            boxes.append(Box(corner, shape, first, f".{part.name}", shape))
        box = Box(self.place + corner, (1,) * len(self.place) + self.shape)
        return ArrayLocation(key, whole, dtype, tuple(boxes) or (box,))


def layer_place(arch: Architecture, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """How the keys of a layer begin, its place in their arrays, and the extent of that place."""
    if arch.num_dense_layers or arch.linear:
        # megatron stacks layers in one array only where all are alike.
        return f"decoder.layers.{layer}", (), ()
    return "decoder.layers", (layer,), (arch.num_layers,)


def layer_tensors(arch: Architecture, vocab_rows: int) -> Iterator[LayerTensor]:
    """All parameters of the model, in its order."""
    for parameter in model_parameters(arch):
        name = parameter.slot.megatron
        shape = local_shape(parameter, arch, vocab_rows, 1)
        if parameter.layer is None:
            yield LayerTensor(parameter, name, name, (), (), shape)
            continue
        layers, place, extent = layer_place(arch, parameter.layer)
        if parameter.expert is None:
            norms = fused_norms(arch, parameter.layer)
            stored_names = {name: fused for fused, name in norms.items()}
            own = f"{layers}.{name}"
            fused = f"{layers}.{stored_names.get(name, name)}"
            both = name == BEFORE_EXPERTS and arch.has_experts(parameter.layer)
            # The first is the one that is written, and looked for first.
            keys = (own, fused) if both else (fused, own)
            yield LayerTensor(parameter, *keys, place, extent, shape, both)
        else:
            key = f"{layers}.mlp.experts.experts.{name}"
            place = (*place, parameter.expert)
            extent = (*extent, arch.num_experts)
            yield LayerTensor(parameter, key, key, place, extent, shape)


def to_hf(
    items: Iterable[LayerTensor], arch: Architecture, read: Callable[[LayerTensor], Tensor]
) -> dict[str, Tensor]:
    """The HF tensors that ``items`` make up together, which ``read`` gives; rows of a padded
    vocabulary are left out."""
    tensors: dict[str, Tensor] = {}
    for item in items:
        whole = read(item)
        rows = whole.shape[0] if item.parameter.slot.kind == "vocab" else arch.vocab_size
        parts = shards(item.parameter, arch, rows, 0, 1)
        if len(parts) == 1 and parts[0].full == tuple(whole.shape):
            # Nothing to cut: the largest tensors are not copied.
            return {parts[0].name: whole}
        for shard in parts:
            if shard.name not in tensors:
                tensors[shard.name] = torch.empty(shard.full, dtype=whole.dtype)
            tensors[shard.name][tensor_slices(shard)] = part_of(whole, shard)
    return tensors


class CheckpointReader:
    """The arrays of a checkpoint directory, item by item.

    A NeMo 2 checkpoint (``weights/`` and ``context/``) is read too: its keys begin with
    ``module.``. ``allow_pickle``: its index may name anything; what it names is run.
    """

    def __init__(self, path: Path, *, allow_pickle: bool = False) -> None:
        if (path / NEMO_WEIGHTS / ".metadata").is_file():
            path = path / NEMO_WEIGHTS
        if not (path / ".metadata").is_file():
            raise ValueError(
                f"{path} is not a distributed checkpoint of megatron (no file .metadata in it)"
            )
        self.path = path
        self.metadata = FileSystemReader(path).read_metadata() if allow_pickle else read_index(path)
        prefixed = any(key.startswith(NEMO_PREFIX) for key in self.metadata.state_dict_metadata)
        self.prefix = NEMO_PREFIX if prefixed else ""

    def array(self, item: LayerTensor, *, any_rows: bool = False) -> tuple[str, Any]:
        """Key and description of the array that holds ``item``.

        Raises:
            ValueError: there is none, or (unless ``any_rows``) one of another shape.
        """
        box = item.location("", torch.float32).boxes[0]  # the first of several arrays
        shape = box.array_shape or item.extent + item.shape
        for key in (self.prefix + item.key, self.prefix + item.other_key):
            stored = self.metadata.state_dict_metadata.get(key + box.suffix)
            if not isinstance(stored, TensorStorageMetadata):
                continue
            if tuple(stored.size) != shape and not any_rows:
                raise ValueError(
                    f"{self.path}: {key} has shape {tuple(stored.size)}, but config.json means"
                    f" {shape}; give the config.json of this model"
                )
            return key, stored
        raise ValueError(
            f"{self.path} holds no {item.key}; its config.json belongs to another model"
        )

    def vocab_rows(self, arch: Architecture) -> int:
        """Rows of the stored embedding, padding included."""
        every = layer_tensors(arch, arch.vocab_size)
        embedding = next(item for item in every if item.key == EMBEDDING.megatron)
        return int(self.array(embedding, any_rows=True)[1].size[0])

    def read(self, item: LayerTensor) -> Tensor:
        """The item. Raises ValueError as ``array`` does."""
        key, stored = self.array(item)
        values = torch.empty(item.shape, dtype=stored.properties.dtype)
        reader = PartReader(self.path, self.metadata)
        reader.want(item.location(key, values.dtype), 0, values.view(-1))
        reader.read()
        return values


def check_tied_head(reader: CheckpointReader, arch: Architecture, embedding: LayerTensor) -> None:
    """Raises ValueError when config.json ties the head to the embedding but another head is stored.

    NeMo 2 stores Qwen2 with a head of its own, whatever its config.json says.
    """
    head = LayerTensor(
        Parameter(HEAD, HEAD.hf), HEAD.megatron, HEAD.megatron, (), (), embedding.shape
    )
    is_stored = reader.prefix + head.key in reader.metadata.state_dict_metadata
    if not arch.tied_embeddings or not is_stored:
        return
    tokens = slice(0, arch.vocab_size)  # without padding
    if not torch.equal(reader.read(head)[tokens], reader.read(embedding)[tokens]):
        raise ValueError(
            f"{reader.path} holds an {head.key} that differs from the embedding, but config.json"
            " has tie_word_embeddings true; set it to false there"
        )


def read_hf(
    path: Path, arch: Architecture, announce: Callable[[int], None], *, allow_pickle: bool = False
) -> Iterable[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every tensor, in the order of the model.

    One parameter is in memory at a time; ``announce`` gets its bytes before it is read.
    ``allow_pickle``: see CheckpointReader.
    """
    reader = CheckpointReader(path, allow_pickle=allow_pickle)
    stored = list(layer_tensors(arch, reader.vocab_rows(arch)))
    for item in stored:
        reader.array(item)  # all are there and fit, before the first is read
    check_tied_head(reader, arch, stored[0])  # the order of the model begins with the embedding
    for _, group in groupby(stored, lambda item: item.parameter.names):
        items = list(group)
        size = reader.array(items[0])[1].properties.dtype.itemsize
        announce(sum(math.prod(item.shape) for item in items) * size)
        yield from to_hf(items, arch, reader.read).items()
