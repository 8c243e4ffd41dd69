"""Files of one JSON object a line, each with its ``step``, over several starts of a run: above all
``metrics.jsonl``, and the keys of pass@k in it."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoints.directory import PARTIAL

Row = dict[str, float | int | None]  # a value that was not finite is null
PASS_AT = "eval/pass_at_"  # the k follows
_PASS_AT_K = re.compile(rf"{PASS_AT}(\d+)")  # with a "/SOURCE" after it, it is another metric


def read_metrics(path: Path) -> list[Row]:
    """One row a step, ascending.

    Of a step that was written twice (by a run that was resumed from before it), the last row
    counts; a last line that a kill cut off is left out.

    Raises:
        ValueError: no such file, or a damaged line that is not the last.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the metrics.jsonl of a run")
    by_step = {row["step"]: row for _, row in read_rows(path) if row is not None}
    return [by_step[step] for step in sorted(by_step)]


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """The steps that have ``key``, and its values."""
    present = [(row["step"], value) for row in rows if (value := row.get(key)) is not None]
    return [int(step or 0) for step, _ in present], [float(value) for _, value in present]


def is_held_out(key: str) -> bool:
    """Whether a metric is one of held-out prompts: taken at a few steps and each time of many
    responses, so its values stand as they are, while those of training are smoothed."""
    return key.startswith("eval/")


def pass_at_ks(rows: Iterable[Row]) -> list[int]:
    """The k of which a row has pass@k, ascending."""
    keys = {key for row in rows for key, value in row.items() if value is not None}
    return sorted(int(found[1]) for found in map(_PASS_AT_K.fullmatch, keys) if found)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(line with its line break, its row); None for a last line that a kill cut off. A missing
    file has no rows.

    Raises:
        ValueError: a line is damaged; names it and what to do.
    """
    if not path.is_file():
        return
    # Only a newline ends a line here: str.splitlines would also cut inside some responses. Bytes
    # that are no UTF-8 are carried through as they are.
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        lines = list(file)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("a row has its step, an integer")
        except ValueError as error:
            # A row is written with its line break: what has none was cut off.
            if number == len(lines) and not line.endswith("\n"):
                yield line, None
                return
            raise ValueError(
                f"{path}: line {number} is damaged ({error}): {line[:80].strip()!a}; repair or"
                " delete the line, or move the file away: a run then continues without its rows"
            ) from None
        # A last row that was cut off just before its line break is whole. With the break a row that
        # is appended gets a line of its own.
        yield line.rstrip("\n") + "\n", row


def check_rows(path: Path) -> None:
    """Reads every line; raises as ``read_rows`` does."""
    for _ in read_rows(path):
        pass


def missing_steps(path: Path, last: int) -> list[int]:
    """The steps from 1 to ``last`` that have no row."""
    present = {row["step"] for _, row in read_rows(path) if row is not None}
    return sorted(set(range(1, last + 1)) - present)


def archive_rows(path: Path, last: int) -> Path | None:
    """Moves the rows of steps after ``last``, which a run is going to overwrite, to the end of
    ``NAME.overwritten.jsonl``. A line that was cut off goes with them.

    No row is lost at any moment: the rows are copied first, then a shorter file replaces the old.

    Returns:
        That file, None where there is no such row.
    """
    kept = []
    overwritten = []
    for line, row in read_rows(path):
        if row is not None and row["step"] <= last:
            kept.append(line)
        else:
            overwritten.append(line.rstrip("\n") + "\n")
    if not overwritten:
        return None
    # A kill between the two leaves the rows in both files: better twice than nowhere.
    archive = path.with_name(f"{path.stem}.overwritten{path.suffix}")
    _write(archive, overwritten, "a")
    shorter = path.with_name(f"{path.name}{PARTIAL}")
    _write(shorter, kept, "w")
    shorter.replace(path)
    return archive


def _write(path: Path, lines: list[str], mode: str) -> None:
    with path.open(mode, encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Writes a small file whole: a run may be killed at any moment."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
