"""Reads what an offline run of wandb leaves. The package has no reader in Python; its file is a
log of LevelDB's format (blocks of 32 KiB, records in chunks) behind a header of its own, and the
records are protocol buffers, which the package does have."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 1 << 15
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What a page of wandb would show of it. ``exit_code``: None where its end was not written."""

    about: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


def read_runs(folder: Path) -> list[OfflineRun]:
    """The offline runs below ``folder/wandb``, oldest first."""
    return [_read(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(file: Path) -> OfflineRun:
    run = OfflineRun()
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.about = record.run
            run.config = {
                item.key: json.loads(item.value_json) for item in record.run.config.update
            }
        elif kind == "history":
            items = record.history.item
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            run.history.append(row)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> Iterator[bytes]:
    assert data.startswith(b":W&B")
    place = 7
    record = b""
    while place + _HEADER.size <= len(data):
        left_in_block = _BLOCK - place % _BLOCK
        if left_in_block < _HEADER.size:
            place += left_in_block
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        record += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
