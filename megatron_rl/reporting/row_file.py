"""Files of one JSON object a line, each with its ``step``, over several starts of a run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path


def check_rows(path: Path) -> None:
    """Reads every line. A last line that a kill cut off, or a missing file, is no damage.

    Raises:
        ValueError: a line is damaged; names it and what to do.
    """
    for _ in _steps(path):
        pass


def set_aside(path: Path, last: int) -> Path | None:
    """Moves the rows of steps after ``last``, which a run is going to repeat, into a new file.

    Returns that file, None where there is no such row. A line that was cut off goes with them. Both
    files are whole at any moment: the rows are copied first, then a shorter file replaces the old.

    Example: ``set_aside(run / "metrics.jsonl", 20)`` gives
    ``run / "metrics.from-step-21.1.jsonl"``.
    """
    kept = []
    repeated = []
    for step, line in _steps(path):
        if step is not None and step <= last:
            kept.append(line)
        else:
            repeated.append(line)
    if not repeated:
        return None
    # A kill between the two leaves the rows in both files: better twice than nowhere.
    aside = _unused(path, last + 1)
    _write(aside, repeated)
    shorter = path.with_name(f"{path.name}.tmp-partial")
    _write(shorter, kept)
    shorter.replace(path)
    return aside


def _steps(path: Path) -> Iterator[tuple[int | None, str]]:
    """(step, line with its line break) of each row; (None, line) of a last one that was cut off."""
    if not path.is_file():
        return
    # Only a newline ends a line here: str.splitlines would also cut inside some responses. Bytes
    # that are no UTF-8 are carried through as they are: this only moves lines.
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        lines = list(file)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = json.loads(line)["step"]
            if not isinstance(step, int):
                raise TypeError(f"step is {step!r}")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                yield None, line
                return
            raise ValueError(
                f"{path}: line {number} is damaged ({type(error).__name__}: {error}); repair or "
                "delete that line, or move the file away: the run then goes on without its rows"
            ) from None
        # A last row that was cut off just before its line break is whole. With the break a row that
        # is appended gets a line of its own.
        yield step, line if line.endswith("\n") else line + "\n"


def _unused(path: Path, step: int) -> Path:
    """The first of ``NAME.from-step-STEP.1.jsonl``, ``...2.jsonl``, ... that does not exist."""
    for number in itertools.count(1):
        unused = path.with_name(f"{path.stem}.from-step-{step}.{number}{path.suffix}")
        if not unused.exists():
            return unused
    raise AssertionError("unreachable")


def _write(path: Path, lines: list[str]) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
