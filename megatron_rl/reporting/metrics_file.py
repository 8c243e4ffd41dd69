"""Reading ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, float | int | None]  # a value that was not finite is null
Series = tuple[list[int], list[float]]  # steps, values


def read_metrics(path: Path) -> list[Row]:
    """One row a step, ascending.

    Of a step that was written twice (by a run that was resumed from before it), the last row
    counts; a last line that a kill cut off is left out.

    Raises:
        ValueError: no such file, a broken line that is not the last, or a row without its step.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the metrics.jsonl of a run")
    by_step: dict[int, Row] = {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}: line {number} is not JSON ({error.msg}); the file is damaged"
            ) from error
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(
                f"{path}: line {number} is {line[:80]}; a row has its step, an integer: delete the"
                " line or restore the file"
            )
        by_step[step] = row
    return [by_step[step] for step in sorted(by_step)]


def series(rows: Sequence[Row], key: str) -> Series:
    """The steps that have ``key``, and its values."""
    present = [row for row in rows if key in row and row[key] is not None]
    return [int(row["step"]) for row in present], [float(row[key]) for row in present]
