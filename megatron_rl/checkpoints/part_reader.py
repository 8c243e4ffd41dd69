"""What one rank reads of a checkpoint, straight into tensors that are there."""

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megatron_rl.checkpoints.chunks import ArrayLocation, Chunk
from megatron_rl.checkpoints.safe_load import COMMON, load_plain

# What megatron-core writes since 0.19 in place of ``common.pt``: an object among the shards.
COMMON_STATE = "common_state/shard_0_1"


class PartReader:
    """Collects what is needed of the checkpoint ``path``, then reads it.

    Attributes:
        index: of ``safe_load.read_index``.
        objects: those that were needed, by key, when they have been read.
    """

    def __init__(self, path: Path, index: Metadata) -> None:
        self.objects: dict[str, Any] = {}
        self._path = path
        self._reader = FileSystemReader(path)
        self._index = index
        self._reader.set_up_storage_reader(self._index, is_coordinator=False)
        self._wanted: dict[str, list[tuple[Chunk, Tensor, bool]]] = defaultdict(list)
        self._object_keys: list[str] = []

    def want(self, place: ArrayLocation, start: int, values: Tensor) -> None:
        """``values``, flat and contiguous, are the elements from ``start`` on of a rank's tensor
        that belongs to ``place``."""
        for chunk, (low, high) in place.chunks(start, start + values.numel()):
            # A view: what is read goes into the tensor itself.
            target = values[low - start : high - start].view(tuple(chunk.sizes))
            self._wanted[chunk.key].append((chunk, target, place.may_differ))

    def want_object(self, key: str) -> None:
        """The object ``key``, to be found in ``objects``."""
        self._object_keys.append(key)

    @torch.no_grad()
    def read(self) -> None:
        """Fills all tensors.

        Raises:
            ValueError: the checkpoint lacks something, or has it in another shape, or reading it
                could run a program.
        """
        self._reader.read_data(LoadPlan(self.items()), _Targets(self._wanted, self.objects)).wait()

    def items(self) -> list[ReadItem]:
        """Which stored chunks are read, and where each goes. Raises ValueError as ``read``."""
        items: list[ReadItem] = []
        for key, wanted in self._wanted.items():
            items += self._array_items(key, wanted)
        for key in self._object_keys:
            self._stored(key, BytesStorageMetadata)
            at = MetadataIndex(key)
            # An object is read whole, so its offsets and lengths say nothing.
            nothing = torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, at, nothing, at, nothing, nothing))
        return items

    def _array_items(self, key: str, wanted: list[tuple[Chunk, Tensor, bool]]) -> list[ReadItem]:
        array = self._stored(key, TensorStorageMetadata)
        shape = torch.Size(wanted[0][0].array_shape)
        may_differ = wanted[0][2]
        if array.size != shape and not may_differ:
            raise ValueError(
                f"checkpoint {self._path}: {key} is {tuple(array.size)} there and {tuple(shape)}"
                " here; take a checkpoint of this model"
            )
        items = list(read_items(key, array, [chunk for chunk, _, _ in wanted]))
        if may_differ:  # what the stored array lacks is not read, and stays zero
            for _, target, _ in wanted:
                target.zero_()
            return items
        # Stored rectangles are disjoint: as many elements are all of them.
        there = sum(math.prod(item.lengths) for item in items)
        here = sum(target.numel() for _, target, _ in wanted)
        if there != here:
            raise ValueError(
                f"checkpoint {self._path}: {there} of {here} elements of {key} are there; take"
                " another checkpoint"
            )
        return items

    def _stored(self, key: str, kind: type) -> Any:
        stored = self._index.state_dict_metadata.get(key)
        if not isinstance(stored, kind):
            raise ValueError(
                f"checkpoint {self._path} has no {key}; take a checkpoint of this model"
            )
        return stored


def read_common(path: Path, index: Metadata) -> Any:
    """What the checkpoint ``path`` stores once, in either form that megatron-core writes it.

    Raises:
        ValueError: it has neither, or reading it could run a program.
    """
    if (path / COMMON).is_file():
        return load_plain(path / COMMON, str(path / COMMON))
    reader = PartReader(path, index)
    reader.want_object(COMMON_STATE)
    reader.read()
    return reader.objects[COMMON_STATE][0]


def read_items(
    key: str, array: TensorStorageMetadata, wanted: Sequence[Chunk]
) -> Iterator[ReadItem]:
    """What the stored rectangles of an array have of each needed chunk, in the order of the chunks.

    torch sorts rectangles along one axis. Those of an array that stacks layers and experts nearly
    all overlap there, so that every needed one is compared with all that any rank has stored. Here
    they are sorted by the numbers of their first and last element in the flattened array.
    """
    stored = array.chunks
    table = (len(stored), len(array.size))
    begin = np.array([chunk.offsets for chunk in stored], dtype=np.int64).reshape(table)
    end = begin + np.array([chunk.sizes for chunk in stored], dtype=np.int64).reshape(table)
    # Of each axis the product of the lengths after it; the cut is for a scalar, without axes.
    after = np.array([*array.size[1:], 1], dtype=np.int64)
    strides = np.cumprod(after[::-1])[::-1][: len(array.size)]
    order = np.argsort(begin @ strides, kind="stable")
    firsts = (begin @ strides)[order]
    # A rectangle that ends before the needed one is compared if one sorted before it does not.
    furthest = np.maximum.accumulate(((end - 1) @ strides)[order])
    for number, chunk in enumerate(wanted):
        corner = np.array(chunk.offsets, dtype=np.int64)
        edge = corner + np.array(chunk.sizes, dtype=np.int64)
        # Neither row ever falls: all before ``low`` end before the needed one begins, and all from
        # ``high`` on begin after its last element.
        low = np.searchsorted(furthest, corner @ strides, side="left")
        high = np.searchsorted(firsts, (edge - 1) @ strides, side="right")
        near = order[low:high]
        starts = np.maximum(begin[near], corner)
        lengths = np.minimum(end[near], edge) - starts
        for place in np.flatnonzero((lengths > 0).all(axis=1)):
            yield ReadItem(
                LoadItemType.TENSOR,
                dest_index=MetadataIndex(key, torch.Size(chunk.offsets), number),
                dest_offsets=torch.Size((starts[place] - corner).tolist()),
                storage_index=MetadataIndex(key, stored[near[place]].offsets, int(near[place])),
                storage_offsets=torch.Size((starts[place] - begin[near[place]]).tolist()),
                lengths=torch.Size(lengths[place].tolist()),
            )


class _Targets(DefaultLoadPlanner):
    """Tells torch's reader where everything goes."""

    def __init__(
        self, wanted: dict[str, list[tuple[Chunk, Tensor, bool]]], objects: dict[str, Any]
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._objects = objects

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        # ``read_items`` numbers the chunks of a key in the order in which they were needed.
        assert index.index is not None
        return self._wanted[index.fqn][index.index][1]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self._objects[key] = load_plain(value, f"object {key} of the checkpoint")
