"""Says whether checkpoints are what was written: one line for each, and one for each damaged file.

    python tools/verify_checkpoint.py run_dir/checkpoints/step_000020 [more ...]
    python tools/verify_checkpoint.py run_dir/checkpoints             # all of a run
    python tools/verify_checkpoint.py --sizes-only run_dir/checkpoints

Every file is compared with the size and the digest in the manifest; --sizes-only reads the manifest
alone. Checkpoints from before there were digests are compared by size, and the line says so. The
exit code is 0 when all are whole, 1 when one is damaged, 2 when there is none to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.checkpoints import directory
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.runtime.disk import as_text


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="checkpoints, or folders of them")
    parser.add_argument("--sizes-only", action="store_true", help="do not read the files")
    parser.add_argument("--threads", type=int, default=4, help="files read at a time")
    options = parser.parse_args(arguments)
    paths: list[Path] = []
    for path in options.paths:
        found = checkpoints(path)
        if not found:
            print(f"error: {path} is no checkpoint and holds none", file=sys.stderr)
            return 2
        paths += found
    damages = [
        verify(path, sizes_only=options.sizes_only, threads=options.threads) for path in paths
    ]
    return int(any(damages))


def checkpoints(path: Path) -> list[Path]:
    """``path`` itself, or the checkpoints in it, by step."""
    if (path / directory.MANIFEST).is_file() or directory.step_of(path) is not None:
        return [path] if path.is_dir() else []
    return directory.steps(path)


def verify(path: Path, *, sizes_only: bool, threads: int) -> bool:
    """Prints what is wrong with the checkpoint at ``path``; returns whether something is."""
    problems = directory.problems(path)
    if not problems and not sizes_only:
        names = directory.file_names(path)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            found = pool.map(lambda name: directory.damaged(path, [name]), names)
        problems = sorted(problem for problem in found if problem is not None)
    for problem in problems:
        print(f"{path}: {problem}")
    if problems:
        return True
    how = "sizes agree" if sizes_only else "sizes and digests agree"
    size = as_text(sum(file.stat().st_size for file in path.iterdir()))
    print(f"{path}: whole, {len(directory.file_names(path))} files, {size}, {how}")
    return False


if __name__ == "__main__":
    sys.exit(main())
