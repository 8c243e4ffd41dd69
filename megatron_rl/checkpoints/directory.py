"""Directories of checkpoints: names, completeness, choice of the newest, removal of old ones.

A checkpoint is written into ``<path>.tmp-partial``, sealed by a manifest (all files, their sizes
and digests) that is written last, and renamed. So ``step_000012`` is either whole or was damaged
afterwards; the manifest tells which.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.runtime.digest import file_digest

MANIFEST = "manifest.json"
PARTIAL = ".tmp-partial"
_REPLACED = ".tmp-replaced"
STEP = re.compile(r"step_(\d{6,})")
logger = logging.getLogger(__name__)


def step_path(root: Path, step: int) -> Path:
    """``root/step_000012`` for step 12."""
    return root / f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """12 for ``.../step_000012``; None for any other name."""
    match = STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


def begin(path: Path) -> Path:
    """An empty directory to write the checkpoint ``path`` into; removes what a dead writer left.
    One process calls this."""
    partial = path.with_name(path.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def finish(path: Path, info: Mapping[str, Any], digests: Mapping[str, str] | None = None) -> None:
    """Seals what was written for ``path`` and gives it its name, replacing an older checkpoint.
    One process calls this, when all have written.

    Args:
        info: JSON, kept in the manifest.
        digests: ``file_digest`` of files (by their name below ``path``) whose writers have taken it
            and have forced the file to the disk; the rest is read, and forced there, here. A writer
            on another machine must do so itself: this process can only do it for its own.
    """
    partial = path.with_name(path.name + PARTIAL)
    written = (file for file in partial.rglob("*") if file.is_file())
    names = sorted(file.relative_to(partial).as_posix() for file in written)
    assert names, f"{partial} is empty"
    known = digests or {}
    files = {}
    for name in names:
        if name not in known:
            to_disk(partial / name)
        digest = known.get(name) or file_digest(partial / name)
        files[name] = {"bytes": (partial / name).stat().st_size, "xxh3": digest}
    manifest = partial / MANIFEST
    text = json.dumps({"info": dict(info), "files": files}, indent=1)
    manifest.write_text(text + "\n", encoding="ascii")
    to_disk(manifest)
    to_disk(partial)  # the entries of the folder: forcing a file does not force its name
    _give_name(path)


def publish(path: Path) -> None:
    """``finish`` without a manifest, of what this machine has written."""
    partial = path.with_name(path.name + PARTIAL)
    for entry in (*partial.rglob("*"), partial):
        to_disk(entry)
    _give_name(path)


def _give_name(path: Path) -> None:
    replaced = path.with_name(path.name + _REPLACED)
    # A folder cannot be renamed onto one that has files. A writer that dies between the two renames
    # leaves no folder of this name: ``clean`` gives the older one its name back.
    if path.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        path.rename(replaced)
    path.with_name(path.name + PARTIAL).rename(path)
    to_disk(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def to_disk(path: Path) -> None:
    """Forces a file or folder to the disk: contents must be there before the name says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problem(path: Path) -> str | None:
    """Why ``path`` is not a whole checkpoint, in a few words; None when it is. Compares sizes only:
    see ``damaged``."""
    return next(iter(problems(path)), None)


def problems(path: Path) -> list[str]:
    """``problem`` of every file that is missing or has another size."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return [f"no {MANIFEST} (not a checkpoint, or its writer was stopped)"]
    try:
        content = _manifest(path)
        sizes = {name: int(entry["bytes"]) for name, entry in content["files"].items()}
        int(content["info"].get("step", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    found = []
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != size:
            found.append(f"{name} has {file.stat().st_size} bytes, {size} were written")
    return found


def damaged(path: Path, names: Sequence[str]) -> str | None:
    """Which of the files ``names`` no longer has the digest that it was sealed with, or None.

    Reads them whole.
    """
    files = _manifest(path)["files"]
    for name in names:
        if file_digest(path / name) != files[name]["xxh3"]:
            return f"{name} is not what was written (its digest differs)"
    return None


def file_names(path: Path) -> list[str]:
    """The files of a checkpoint, the largest first.

    Dealing them out in this order gives every process about as many bytes.
    """
    files = _manifest(path)["files"]
    return sorted(files, key=lambda name: (-files[name]["bytes"], name))


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="ascii"))
    return manifest


def check(path: Path) -> dict[str, Any]:
    """The ``info`` of the checkpoint.

    Raises:
        ValueError: it is not whole.
    """
    wrong = problem(path)
    if wrong is not None:
        raise ValueError(f"checkpoint {path}: {wrong}; choose another one, or delete it")
    info: dict[str, Any] = _manifest(path)["info"]
    return info


def check_whole(path: Path) -> None:
    """Reads all files; raises ValueError where one is not what was written."""
    check(path)
    wrong = damaged(path, file_names(path))
    if wrong is not None:
        raise ValueError(f"checkpoint {path}: {wrong}; choose another one, or delete it")


def newest_valid(root: Path, below: int | None = None) -> Path | None:
    """The whole checkpoint with the highest step, or None; warns of each newer one that is damaged.

    One process calls this for all: on a shared disk two processes may see different files.

    Args:
        below: only steps under this one.
    """
    for step, path in reversed(_numbered(root)):
        if below is not None and step >= below:
            continue
        wrong = problem(path)
        if wrong is None:
            return path
        logger.warning("checkpoint %s is skipped: %s", path, wrong)
    return None


def newest(root: Path) -> Path | None:
    """The checkpoint with the highest step by name, whole or not; None without one."""
    return next(reversed(steps(root)), None)


def later_steps(root: Path, step: int) -> list[Path]:
    """The checkpoints of steps after ``step`` that have all their files."""
    return [path for other, path in _numbered(root) if other > step and problem(path) is None]


def prune(root: Path, keep: int, protected: Collection[int] = (), every: int = 0) -> list[Path]:
    """Removes checkpoints older than the newest ``keep`` whole ones; returns what was removed.

    What dead writers left is removed too. A damaged checkpoint never counts as one of the ``keep``;
    one that is newer than them stays, to be examined.

    Args:
        protected: steps that stay, whatever their age.
        every: steps that are multiples of it stay; 0: none.
    """
    assert keep >= 1, f"keep is {keep}"
    there = _numbered(root)
    newest_whole = [step for step, path in there if problem(path) is None][-keep:]
    if len(newest_whole) < keep:
        return clean(root)
    removed = []
    for step, path in there:
        is_multiple = every > 0 and step % every == 0
        if step < newest_whole[0] and step not in protected and not is_multiple:
            shutil.rmtree(path)
            removed.append(path)
    return removed + clean(root)


def clean(root: Path) -> list[Path]:
    """Removes what dead writers left in ``root``, checkpoints or exports; returns what was removed.

    A directory that its writer had put aside, and not replaced when it died, gets its name back.
    """
    removed = []
    # First what was put aside, then what was half written: the order in which ``publish`` renames.
    for replaced in sorted(root.glob(f"*{_REPLACED}")):
        path = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if path.exists():
            shutil.rmtree(replaced)
            removed.append(replaced)
        else:
            replaced.rename(path)
            logger.warning(
                "%s was being replaced when its writer died; the older one is back", path
            )
    for partial in sorted(root.glob(f"*{PARTIAL}")):
        if partial.is_dir():
            shutil.rmtree(partial)
            removed.append(partial)
    return removed


def steps(root: Path) -> list[Path]:
    """The checkpoints in ``root``, whole or not, by step."""
    return [path for _, path in _numbered(root)]


def _numbered(root: Path) -> list[tuple[int, Path]]:
    """As ``steps``, each with its step."""
    there = root.iterdir() if root.is_dir() else ()
    found = [(step, path) for path in there if (step := step_of(path)) is not None]
    for _, path in found:
        if not path.is_dir():
            what = "a link that leads nowhere" if path.is_symlink() else "no folder"
            raise ValueError(f"checkpoint {path}: is {what}; remove it, or put back what it was")
    return sorted(found)
