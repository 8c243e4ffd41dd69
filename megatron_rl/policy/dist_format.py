"""megatron's distributed checkpoint format, read and written tensor by tensor, without building a model or importing megatron.

The format does not depend on the parallel layout: a tensor of all layers (and all experts) is one array ``[layers, experts, ...]``
under one key, stored in pieces; whoever loads takes the pieces it needs.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
import yaml
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import Parameter, boxes, hf_shapes, local_shape, model_parameters

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
# Layer norms are stored under the names of Transformer Engine, which fuses them with the linear layer behind.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# Linear layers that carry an (empty) state of Transformer Engine, for which megatron's loader asks.
STATEFUL = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Slab:
    """One parameter of one layer (and expert): ``array[key][place]`` has ``shape``; ``other_key``: where other writers put it."""

    parameter: Parameter
    key: str
    other_key: str
    place: tuple[int, ...]
    extent: tuple[int, ...]  # of the axes that ``place`` indexes
    shape: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        zeros = (0,) * len(self.shape)
        return ChunkStorageMetadata(torch.Size(self.place + zeros), torch.Size((1,) * len(self.place) + self.shape))


def slabs(arch: Architecture, vocab_rows: int) -> Iterator[Slab]:
    """All parameters of the model, in its order."""
    for parameter in model_parameters(arch):
        name = parameter.slot.megatron
        shape = local_shape(parameter, arch, vocab_rows, 1)
        if parameter.layer is None:
            yield Slab(parameter, name, name, (), (), shape)
        elif parameter.expert is None:
            key, other = (f"decoder.layers.{stored}" for stored in (FUSED.get(name, name), name))
            yield Slab(parameter, key, other, (parameter.layer,), (arch.num_layers,), shape)
        else:
            key = f"decoder.layers.mlp.experts.experts.{name}"
            yield Slab(parameter, key, key, (parameter.layer, parameter.expert), (arch.num_layers, arch.num_experts), shape)


def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))


def to_megatron(slab: Slab, arch: Architecture, tensors: dict[str, Tensor]) -> Tensor:
    """The Megatron parameter made of its whole HF tensors."""
    whole = torch.empty(slab.shape, dtype=next(iter(tensors.values())).dtype)
    for box in boxes(slab.parameter, arch, arch.vocab_size, 0, 1):
        whole[_box(box.local, box.shape)] = tensors[box.name][_box(box.start, box.shape)]
    return whole


def to_hf(slab: Slab, arch: Architecture, whole: Tensor) -> dict[str, Tensor]:
    """The inverse of ``to_megatron``; rows of a padded vocabulary are left out."""
    shapes = hf_shapes(slab.parameter, arch)
    if len(shapes) == 1 and shapes[slab.parameter.names[0]] == tuple(whole.shape):
        return {slab.parameter.names[0]: whole}  # nothing to cut: the largest tensors are not copied
    tensors = {name: torch.empty(shapes[name], dtype=whole.dtype) for name in slab.parameter.names}
    rows = whole.shape[0] if slab.parameter.slot.kind == "vocab" else arch.vocab_size
    for box in boxes(slab.parameter, arch, rows, 0, 1):
        tensors[box.name][_box(box.start, box.shape)] = whole[_box(box.local, box.shape)]
    return tensors


class _Writer(SavePlanner):
    """Plans every slab as a piece of its array; a piece is made when it is written and dropped afterwards."""

    def __init__(self, arch: Architecture, dtype: Callable[[Slab], torch.dtype], produce: Callable[[Slab], Tensor]) -> None:
        self.arch, self.dtype, self.produce = arch, dtype, produce
        self.slabs: dict[tuple[str, torch.Size], Slab] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        items = []
        for slab in slabs(self.arch, self.arch.vocab_size):
            self.slabs[slab.key, slab.chunk.offsets] = slab
            size = torch.Size(slab.extent + slab.shape)
            data = TensorWriteData(chunk=slab.chunk, properties=TensorProperties(dtype=self.dtype(slab)), size=size)
            items.append(WriteItem(MetadataIndex(slab.key, slab.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
            linear = slab.parameter.slot.megatron.removesuffix(".weight")
            if slab.place and linear in STATEFUL:
                of, at = (".".join(map(str, numbers)) for numbers in (slab.extent, slab.place))
                name = f"{slab.key.removesuffix('.weight')}._extra_state/shard_{at}_{of}"
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return torch_checkpoint.default_planner.create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stored = io.BytesIO()
            torch.save([None], stored)
            return stored
        assert write_item.tensor_data is not None and write_item.index.offset is not None
        slab = self.slabs[write_item.index.fqn, write_item.index.offset]
        return self.produce(slab).view(write_item.tensor_data.chunk.sizes)


def write(path: Path, arch: Architecture, dtype: Callable[[Slab], torch.dtype], produce: Callable[[Slab], Tensor]) -> None:
    """Writes a checkpoint of weights into the directory ``path``: ``produce(slab)``, of ``dtype(slab)``, is called once for each
    slab, when it is written."""
    writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        torch_checkpoint.save({}, storage_writer=writer, planner=_Writer(arch, dtype, produce), no_dist=True)
    torch.save({}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps(BACKEND) + "\n", encoding="ascii")


class _Reader(LoadPlanner):
    """Reads one region of one array."""

    def __init__(self, key: str, stored: TensorStorageMetadata, region: ChunkStorageMetadata) -> None:
        self.key, self.stored, self.region = key, stored, region
        self.target = torch.empty(region.sizes, dtype=stored.properties.dtype)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(create_read_items_for_chunk_list(self.key, self.stored, [self.region]))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("arrays only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.target[_box(tuple(read_item.dest_offsets), tuple(read_item.lengths))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class Reader:
    """The arrays of a checkpoint directory, slab by slab. A NeMo 2 checkpoint (``weights/`` and ``context/``) is read, too: its keys
    begin with ``module.``."""

    def __init__(self, path: Path) -> None:
        if (path / "weights" / ".metadata").is_file():
            path = path / "weights"
        if not (path / ".metadata").is_file():
            raise ValueError(f"{path} is not a distributed checkpoint of megatron (no file .metadata in it)")
        self.path, self.reader = path, FileSystemReader(path)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.prefix = "module." if any(key.startswith("module.") for key in self.metadata.state_dict_metadata) else ""

    def array(self, slab: Slab) -> tuple[str, TensorStorageMetadata]:
        """Key and description of the array that holds ``slab``. Raises ValueError when there is none."""
        for key in (self.prefix + slab.key, self.prefix + slab.other_key):
            stored = self.metadata.state_dict_metadata.get(key)
            if isinstance(stored, TensorStorageMetadata):
                return key, stored
        raise ValueError(f"{self.path} holds no {slab.key}; its config.json belongs to another model")

    def vocab_rows(self, arch: Architecture) -> int:
        """Rows of the stored embedding, padding included."""
        return int(self.array(next(slabs(arch, arch.vocab_size)))[1].size[0])

    def read(self, slab: Slab) -> Tensor:
        """The slab. Raises ValueError when the stored array has another shape."""
        key, stored = self.array(slab)
        if tuple(stored.size) != slab.extent + slab.shape:
            raise ValueError(f"{self.path}: {key} has shape {tuple(stored.size)}, but config.json means {slab.extent + slab.shape}")
        planner = _Reader(key, stored, slab.chunk)
        self.reader.read_data(planner.create_local_plan(), planner)
        return planner.target.view(slab.shape)


# Field of ``context/model.yaml`` of NeMo 2, and what it is here. Shapes alone do not tell a wrong rotary base.
NEMO_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "ffn_hidden_size": "ffn_hidden_size",
    "rotary_base": "rope_theta",
    "layernorm_epsilon": "norm_eps",
    "share_embeddings_and_output_weights": "tied_embeddings",
}


def check_nemo_config(path: Path, arch: Architecture) -> None:
    """Raises ValueError when ``path`` is a NeMo 2 checkpoint of another model than ``arch``; says nothing about other directories."""
    file = path / "context" / "model.yaml"
    if not file.is_file():
        return
    written = yaml.safe_load(file.read_text(encoding="utf-8"))["config"]
    wrong = [
        f"{theirs} is {written[theirs]!r} there, {getattr(arch, ours)!r} in config.json"
        for theirs, ours in NEMO_FIELDS.items()
        if theirs in written and written[theirs] != getattr(arch, ours)
    ]
    if wrong:
        raise ValueError(f"{file} describes another model: {'; '.join(wrong)}")


def read_hf(path: Path, arch: Architecture, announce: Callable[[int], None]) -> Iterable[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every tensor, in the order of the model, one parameter in memory at a time. ``announce`` is told the
    bytes of a parameter before it is read."""
    reader = Reader(path)
    check_nemo_config(path, arch)
    for slab in slabs(arch, reader.vocab_rows(arch)):
        announce(math.prod(slab.shape) * reader.array(slab)[1].properties.dtype.itemsize)
        yield from to_hf(slab, arch, reader.read(slab)).items()
