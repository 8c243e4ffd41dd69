"""``sweep.json`` in the folder of a sweep: which cells it has, for other programs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoints.directory import PARTIAL
from megatron_rl.sweeping.cells import Cell

NAME = "sweep.json"


def write(out: Path, cells: Sequence[Cell], words: Sequence[str]) -> None:
    """Describes the sweep of the newest start.

    ``name``; ``created``, of the first start into this folder; ``command``; ``keys`` that differ;
    ``cells``: ``name`` (its folder), ``label`` (without the seed), ``seed``, ``values`` of the keys
    as they were typed, ``same_as``: the cell that was run for it, or null.

    Raises:
        ValueError: the folder cannot be written, or has a file of this name that is another.
    """
    file = out / NAME
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    keys: dict[str, None] = {}  # a set in the order of the command line
    entries = []
    for cell in cells:
        values = _values(cell)
        keys |= dict.fromkeys(values)
        entry = {
            "name": cell.name,
            "label": cell.label,
            "seed": cell.config.seed,
            "values": values,
            "same_as": cell.same_as,
        }
        entries.append(entry)
    content = {
        "name": sweep_name(out),
        "created": _created(file) or now,
        "command": shlex.join(["python", "-m", "megatron_rl.sweep", *words]),
        "keys": list(keys),
        "cells": entries,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{NAME}{PARTIAL}")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({error.strerror}: {error.filename}); give a folder "
            "to write into"
        ) from None


def sweep_name(out: Path) -> str:
    """The name of a sweep is that of its folder."""
    return out.resolve().name


def _values(cell: Cell) -> dict[str, str]:
    pairs = [text.lstrip("+").partition("=") for text in cell.differing]
    return {key: value for key, _, value in pairs}


def _created(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["created"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file}: is not the file of a sweep; move it away, or give another --out"
        ) from None
