"""Reads checkpoints without running what is in them.

Python's pickle calls whatever functions a file names. torch and megatron use it in three places of
a distributed checkpoint: the index ``.metadata``, the objects among the shards, and ``common.pt``.
Only names that a checkpoint needs pass here; what has passed may then be given to libraries that
read it with any name allowed.
"""

import enum
import io
import pickle
import struct
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, SavePlan

from megatron_rl.errors import first_line

INDEX = ".metadata"
COMMON = "common.pt"
# What the index of a distributed checkpoint is made of: descriptions of tensors, and their places.
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
# megatron-core before 0.16 wrote these subclasses, which add nothing that a reader needs.
_OLDER = "megatron.core.dist_checkpointing.strategies.torch"
_RENAMED = {
    (_OLDER, "MCoreMetadata"): Metadata,
    (_OLDER, "MCoreSavePlan"): SavePlan,
    ("pathlib._local", "PosixPath"): PosixPath,  # so Python 3.13 writes it
}
# What unpickling raises where bytes have changed: an opcode may find an empty stack, a number that
# was not noted, an argument that is cut off, or a function that does not take what it is given.
_DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    LookupError,
    RuntimeError,
)
REMEDY = "it could run any program and was not read; take a checkpoint from a source you trust"


class _UnknownNameError(Exception):
    """The file names something that it does not need."""


def _enum_member(kind: Any, name: str) -> Any:
    """``getattr`` for members of enums alone."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise _UnknownNameError(f"it takes {name!r} out of {kind!r}")
    return kind[name]


class _Index(pickle.Unpickler):
    """Unpickles the index; any other name is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RENAMED:
            return _RENAMED[module, name]
        # Python 3.12 and newer write a member of an enum so.
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _INDEX_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise _UnknownNameError(f"it names {module}.{name}")


def read_index(path: Path) -> Metadata:
    """The index of a distributed checkpoint.

    Raises:
        ValueError: it is damaged, or names anything but the parts of an index.
    """
    file = path / INDEX
    try:
        metadata = _Index(io.BytesIO(file.read_bytes())).load()
    except _UnknownNameError as error:
        raise ValueError(
            f"{file} is not the index of a checkpoint ({error}); {REMEDY} "
            "(tools/convert_checkpoint.py to-hf --allow-pickle reads the weights all the same)"
        ) from error
    except _DAMAGED as error:
        raise ValueError(
            f"{file}: the index of the checkpoint is damaged ({error}); take another checkpoint"
        ) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(
            f"{file} holds a {type(metadata).__name__}, not the index of a checkpoint; take another"
            " checkpoint"
        )
    return metadata


def load_plain(file: Path | io.BytesIO, name: str) -> Any:
    """Tensors, numbers, text and containers of them, as ``torch.save`` wrote them.

    ``name`` is for the message.

    Raises:
        ValueError: the file is damaged, or holds anything else.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        named = [
            line.strip()
            for line in str(error).splitlines()
            if "GLOBAL" in line or "Unsupported class" in line
        ]
        if named:
            raise ValueError(
                f"{name} holds more than tensors and plain values ({named[0][:200]}); {REMEDY}"
            ) from error
        raise ValueError(
            f"{name} is damaged ({first_line(error)}); take another checkpoint"
        ) from error


def check_files(path: Path) -> None:
    """Checks the index and the common file of the checkpoint at ``path``.

    Raises:
        ValueError: one of them is damaged, or could run a program.
    """
    if (path / INDEX).is_file():  # the manifest says whether it must be there
        read_index(path)
    if (path / COMMON).is_file():
        load_plain(path / COMMON, str(path / COMMON))
