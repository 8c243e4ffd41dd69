"""What a rank has written of a checkpoint, for the process that seals it.

A receipt is a file next to the parts; sealing the checkpoint removes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoints.chunks import Chunk

_PREFIX = ".written-"


@dataclass(frozen=True)
class StoredItem:
    """A chunk, or an object (``chunk`` None), in a file; ``offset`` and ``length`` in bytes."""

    key: str
    chunk: Chunk | None
    file: str
    offset: int
    length: int


@dataclass
class Receipt:
    """``digests``: of each file that was written and forced to the disk, by name; ``stored``: what
    is in them, arrays before objects when it has been read."""

    digests: dict[str, str] = field(default_factory=dict)
    stored: list[StoredItem] = field(default_factory=list)

    def add(self, other: Receipt) -> None:
        """Also what ``other`` names."""
        self.digests |= other.digests
        self.stored += other.stored


def receipt_path(folder: Path, rank: int) -> Path:
    """The file of a rank's receipt."""
    return folder / f"{_PREFIX}{rank:05d}"


def to_json(receipt: Receipt) -> bytes:
    """Lists rather than objects: there may be a hundred thousand chunks."""
    arrays: list[list[Any]] = []
    objects: list[list[Any]] = []
    for item in receipt.stored:
        place = (item.file, item.offset, item.length)
        if item.chunk is None:
            objects.append([item.key, *place])
        else:
            chunk = item.chunk
            dtype = str(chunk.dtype).removeprefix("torch.")
            arrays.append([item.key, chunk.array_shape, dtype, chunk.offsets, chunk.sizes, *place])
    content = {"digests": receipt.digests, "arrays": arrays, "objects": objects}
    return json.dumps(content).encode("ascii")


def from_json(data: bytes) -> Receipt:
    """The inverse."""
    content = json.loads(data)
    receipt = Receipt(content["digests"])
    for key, array_shape, dtype, offsets, sizes, *place in content["arrays"]:
        chunk = Chunk(key, tuple(array_shape), getattr(torch, dtype), tuple(offsets), tuple(sizes))
        receipt.stored.append(StoredItem(key, chunk, *place))
    for key, *place in content["objects"]:
        receipt.stored.append(StoredItem(key, None, *place))
    return receipt
