"""Makes a checkpoint of the parts that ranks have written: its index, its manifest and its name.

A part counts when its receipt is there: a file next to the parts, which a rank leaves after all of
its files are on the disk. So the manifest names nothing that a crash could still take away.
"""

import json
import math
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoints import directory
from megatron_rl.checkpoints.chunks import Chunk
from megatron_rl.checkpoints.safe_load import INDEX

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


class StoredItem(NamedTuple):
    """A chunk, or an object (``chunk`` None), in a file; ``offset`` and ``length`` in bytes."""

    key: str
    chunk: Chunk | None
    file: str
    offset: int
    length: int


@dataclass
class Receipt:
    """What a rank has written: the digest of each file that it has forced to the disk, by name,
    and what is in them."""

    digests: dict[str, str] = field(default_factory=dict)
    stored: list[StoredItem] = field(default_factory=list)

    def to_json(self) -> bytes:
        """Lists rather than objects: there may be a hundred thousand chunks."""
        return json.dumps([self.digests, self.stored]).encode("ascii")

    def add(self, data: bytes) -> None:
        """Also what another rank's ``to_json`` names."""
        digests, stored = json.loads(data)
        self.digests |= digests
        for key, chunk, *place in stored:
            self.stored.append(StoredItem(key, Chunk(*chunk) if chunk else None, *place))


def receipt_path(folder: Path, rank: int) -> Path:
    """The file of a rank's receipt."""
    return folder / f".written-{rank:05d}"


def seal(path: Path, num_ranks: int, info: Mapping[str, Any], cancelled: threading.Event) -> bool:
    """Waits for all parts of the checkpoint ``path`` and makes them one. One process calls this.

    Returns:
        False where ``cancelled`` was set before all parts were there.
    """
    partial = path.with_name(path.name + directory.PARTIAL)
    whole = Receipt()
    wait_s = _FIRST_WAIT_S
    for rank in range(num_ranks):
        # The disk is all that ranks and this thread have in common: collectives belong to the main
        # thread of each.
        receipt = receipt_path(partial, rank)
        while not receipt.is_file():
            if cancelled.wait(wait_s):
                return False
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        whole.add(receipt.read_bytes())
    # Without a digest in any receipt: ``finish`` takes it, and forces the file to the disk.
    (partial / INDEX).write_bytes(pickle.dumps(index(whole.stored)))
    for rank in range(num_ranks):
        receipt_path(partial, rank).unlink()  # the manifest names every file that is left
    directory.finish(path, info, whole.digests)
    return True


def index(stored: Sequence[StoredItem]) -> Metadata:
    """torch's index of a distributed checkpoint; every array is there once and whole.

    It has two tables: of each key the array with the rectangles that it is stored in, and of each
    rectangle (key, offsets, its number in that array) the file and the bytes where it lies.
    """
    arrays: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in stored:
        at = MetadataIndex(item.key)
        if item.chunk is None:
            arrays[item.key] = BytesStorageMetadata()
        else:
            number = _add_chunk(arrays, item.chunk)
            at = MetadataIndex(item.key, torch.Size(item.chunk.offsets), number)
        assert at not in places, f"{item.key} was written twice at {at.offset}"
        places[at] = _StorageInfo(item.file, item.offset, item.length)
    for key, array in arrays.items():
        if isinstance(array, BytesStorageMetadata):
            continue
        # No rectangle is there twice, and ranks cut arrays into disjoint ones: they cover an array
        # when they have as many elements.
        written = sum(math.prod(chunk.sizes) for chunk in array.chunks)
        wanted = math.prod(array.size)
        assert written == wanted, f"{written} of the {wanted} elements of {key} were written"
    return Metadata(
        state_dict_metadata=arrays,
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _add_chunk(arrays: dict[str, Any], chunk: Chunk) -> int:
    """The number of the chunk in its array."""
    size = torch.Size(chunk.array_shape)
    properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
    array = arrays.setdefault(chunk.key, TensorStorageMetadata(properties, size, []))
    assert array.size == size and array.properties == properties, (
        f"{chunk.key} is {tuple(array.size)} of {array.properties.dtype} on one rank and"
        f" {tuple(size)} of {chunk.dtype} on another"
    )
    array.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    return len(array.chunks) - 1
