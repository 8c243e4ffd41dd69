"""Carry a folder of wheels to a machine without a package registry: parts of limited size, each
with its digest.

    python tools/bench/pack_wheels.py pack WHEELS PARTS [--part-mib 60]     here
    python pack_wheels.py join PARTS WHEELS  there (needs Python alone, no package)

PARTS gets part_000, part_001, ... and manifest.json, which names every part and every file with its
size and SHA-256. ``join`` refuses parts that are missing or damaged before it writes anything, and
files that are not what was packed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20
MANIFEST = "manifest.json"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(wheels: Path, parts: Path, part_bytes: int) -> list[Path]:
    """Writes the files of ``wheels`` (not of its folders), one after the other, into parts of
    ``part_bytes`` and the manifest.

    Raises:
        ValueError: there is nothing to pack, ``parts`` holds something already, or the size of a
        part is not positive.
    """
    files = sorted(path for path in wheels.iterdir() if path.is_file())
    if not files:
        raise ValueError(
            f"{wheels}: no file in it; download the wheels first (pip download --no-deps -d"
            f" {wheels} ...)"
        )
    if part_bytes < 1:
        raise ValueError(f"--part-mib: a part of {part_bytes} bytes; give 1 or more")
    parts.mkdir(parents=True, exist_ok=True)
    if any(parts.iterdir()):
        raise ValueError(f"{parts}: not empty; give a new folder")
    written: list[Path] = []
    for number, block in enumerate(_blocks(files, part_bytes)):
        written.append(parts / f"part_{number:03d}")
        written[-1].write_bytes(block)
    manifest = {
        kind: [_entry(path) for path in paths]
        for kind, paths in (("files", files), ("parts", written))
    }
    (parts / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="ascii")
    return written


def _entry(path: Path) -> dict[str, str | int]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}


def _blocks(files: list[Path], size: int) -> Iterator[bytes]:
    """The bytes of all files, in blocks of ``size``; the last one may be shorter."""
    block = bytearray()
    for path in files:
        with path.open("rb") as file:
            while read := file.read(size - len(block)):
                block += read
                if len(block) == size:
                    yield bytes(block)
                    block.clear()
    if block:
        yield bytes(block)


def join(parts: Path, wheels: Path) -> list[Path]:
    """The inverse of ``pack``.

    Raises:
        ValueError: names every part that is missing or damaged; nothing is written then. Or a file
        that came out wrong.
    """
    manifest = json.loads((parts / MANIFEST).read_text(encoding="ascii"))
    bad = [entry["name"] for entry in manifest["parts"] if not _is(parts / entry["name"], entry)]
    if bad:
        raise ValueError(f"{parts}: missing or damaged: {', '.join(bad)}; copy them again")
    wheels.mkdir(parents=True, exist_ok=True)
    stream = (block for entry in manifest["parts"] for block in _read(parts / entry["name"]))
    rest, found = b"", []
    for entry in manifest["files"]:
        target, missing = wheels / entry["name"], entry["bytes"]
        with target.open("wb") as file:
            while missing:
                rest = rest or next(stream)
                written = file.write(rest[:missing])
                missing, rest = missing - written, rest[written:]
        found.append(target)
    wrong = [entry["name"] for entry in manifest["files"] if not _is(wheels / entry["name"], entry)]
    if wrong:
        raise ValueError(f"{wheels}: not what was packed: {', '.join(wrong)}; pack again")
    return found


def _is(path: Path, entry: dict[str, str | int]) -> bool:
    return (
        path.is_file() and path.stat().st_size == entry["bytes"] and digest(path) == entry["sha256"]
    )


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(MIB):
            yield block


def main() -> None:
    parser = argparse.ArgumentParser(description="Wheels in parts with digests.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "join"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
        if name == "pack":
            command.add_argument("--part-mib", type=int, default=60)
    options = parser.parse_args()
    try:
        if options.command == "pack":
            written = pack(options.source, options.target, options.part_mib * MIB)
        else:
            written = join(options.source, options.target)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(f"{path.stat().st_size / MIB:8.1f} MiB  {path}" for path in written))


if __name__ == "__main__":
    main()
