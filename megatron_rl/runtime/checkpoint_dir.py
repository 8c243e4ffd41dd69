"""Directories of checkpoints: names, completeness, choice of the newest, removal of old ones. Knows nothing of their content.

A checkpoint is written into ``<path>.tmp-partial``, sealed by a manifest (all files and their sizes) that is written last, and
renamed. So ``step_000012`` is either whole or was damaged afterwards; the manifest tells which.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PARTIAL = ".tmp-partial"
REPLACED = ".tmp-replaced"
STEP = re.compile(r"step_(\d{6,})")
log = logging.getLogger(__name__)


def step_path(root: Path, step: int) -> Path:
    """``root/step_000012`` for step 12."""
    return root / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """12 for ``.../step_000012``; None for any other name."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def begin(path: Path) -> Path:
    """An empty directory to write the checkpoint ``path`` into (one process calls this; what a dead writer left is removed)."""
    partial = path.with_name(path.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def finish(path: Path, info: Mapping[str, Any]) -> None:
    """Seals what was written for ``path`` and gives it its name (one process, when all have written). ``info`` (JSON) is kept in
    the manifest. An older checkpoint of that name is replaced."""
    partial = path.with_name(path.name + PARTIAL)
    files = {file.relative_to(partial).as_posix(): file.stat().st_size for file in sorted(partial.rglob("*")) if file.is_file()}
    assert files, f"{partial} is empty"
    for name in files:
        _to_disk(partial / name)
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"info": dict(info), "files": files}, indent=1) + "\n", encoding="ascii")
    _to_disk(manifest)
    publish(path)


def publish(path: Path) -> None:
    """Gives what ``begin(path)`` made the name ``path``; an older directory of that name is replaced."""
    partial, replaced = path.with_name(path.name + PARTIAL), path.with_name(path.name + REPLACED)
    if path.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        path.rename(replaced)
    partial.rename(path)
    _to_disk(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _to_disk(path: Path) -> None:
    """Contents must be on the disk before the name says that they are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problem(path: Path) -> str | None:
    """Why ``path`` is not a whole checkpoint, in a few words; None when it is."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST} (not a checkpoint, or its writer was stopped)"
    try:
        files = json.loads(manifest.read_text(encoding="ascii"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def check(path: Path) -> dict[str, Any]:
    """The ``info`` of the checkpoint.

    Raises:
        ValueError: it is not whole.
    """
    wrong = problem(path)
    if wrong is not None:
        raise ValueError(f"checkpoint {path}: {wrong}; choose another one, or delete it")
    info: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="ascii"))["info"]
    return info


def newest_valid(root: Path) -> Path | None:
    """The whole checkpoint with the highest step, or None. Every damaged one that is newer is named in a warning.

    One process calls this and tells the others: on a shared disk two processes may not see the same.
    """
    for path in reversed(_steps(root)):
        wrong = problem(path)
        if wrong is None:
            return path
        log.warning("checkpoint %s is skipped: %s", path, wrong)
    return None


def prune(root: Path, keep: int) -> list[Path]:
    """Removes what is older than the newest ``keep`` whole checkpoints, and what dead writers left. Returns what was removed.

    A damaged checkpoint never counts as one of the ``keep``; one that is newer than them stays, for a person to look at.
    """
    assert keep >= 1, f"keep is {keep}"
    steps = _steps(root)
    whole = [path for path in steps if problem(path) is None][-keep:]
    removed = [path for path in steps if len(whole) == keep and (step_of(path) or 0) < (step_of(whole[0]) or 0)]
    removed += sorted(path for suffix in (PARTIAL, REPLACED) for path in root.glob(f"step_*{suffix}"))
    for path in removed:
        shutil.rmtree(path)
    return removed


def _steps(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if path.is_dir() and step_of(path) is not None), key=lambda path: step_of(path) or 0)
