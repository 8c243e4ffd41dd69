"""Reading ``metrics.jsonl``, and the keys of pass@k in it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.reporting.row_file import read_rows

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


def pass_at_ks(rows: Iterable[Row]) -> list[int]:
    """The k of which a row has pass@k, ascending."""
    keys = {key for row in rows for key, value in row.items() if value is not None}
    return sorted(int(found[1]) for found in map(_PASS_AT_K.fullmatch, keys) if found)
