"""Reading ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
    # Lines stay bytes until they are read one by one: damage is then that of a line with a number.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            # A row is written with its line break, so what stands behind the last one was cut off.
            if number == len(lines):
                break
            raise ValueError(
                f"{path}: line {number} is not JSON ({error}); the file is damaged: delete the line"
                " or restore the file"
            ) from error
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            shown = line[:80].decode(errors="replace")
            raise ValueError(
                f"{path}: line {number} is {shown}; a row has its step, an integer: delete the"
                " line or restore the file"
            )
        by_step[step] = row
    return [by_step[step] for step in sorted(by_step)]


def series(rows: Sequence[Row], key: str) -> Series:
    """The steps that have ``key``, and its values."""
    steps = []
    values = []
    for row in rows:
        value = row.get(key)
        if value is not None:
            steps.append(int(row["step"] or 0))
            values.append(float(value))
    return steps, values


def is_held_out(key: str) -> bool:
    """Whether a metric is one of held-out prompts: taken at a few steps and each time of many
    responses, so its values stand as they are, while those of training are smoothed."""
    return key.startswith("eval/")


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite values of up to ``width // 2`` neighbors on either side; a gap stays."""
    half = width // 2
    smoothed = values.copy()
    for index in np.flatnonzero(np.isfinite(values)):
        smoothed[index] = np.nanmean(values[max(0, index - half) : index + half + 1])
    return smoothed
