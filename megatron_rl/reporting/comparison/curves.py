"""Values over steps of a run and of a cell, with gaps where a value is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from megatron_rl.reporting.comparison.cells import Cell, all_runs
from megatron_rl.reporting.comparison.runs import Run
from megatron_rl.reporting.metrics_file import Row, is_held_out
from megatron_rl.reporting.pass_at_k import PASS_AT, pass_at_ks

SMOOTHING = 20  # a curve of training is a moving mean over 1 / SMOOTHING of its steps
MAX_POINTS = 400  # longer curves are means of neighboring steps: an eye sees no more


@dataclass(frozen=True)
class Curve:
    """Positions on the x axis, ascending, and a value at each; NaN is a gap."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Band:
    """Of a cell: median, smallest and largest value of its runs that have one at ``x``.

    ``singles``: the run of each; ``raw``: of a cell with one run, that before smoothing.
    """

    x: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    singles: tuple[Curve, ...]
    raw: Curve | None = None


def run_curve(run: Run, key: str) -> Curve:
    """The rows of the run that have ``key``; of a metric of training all of its steps, so that a
    row without it is a gap too."""
    if is_held_out(key):
        rows = [row for row in run.rows_of(key) if key in row]
    else:
        rows = [row for row in run.rows if row["step"]]  # step 0 is before training
    steps = [float(row["step"] or 0) for row in rows]
    values = [row.get(key) for row in rows]
    y = [np.nan if value is None else float(value) for value in values]
    return Curve(np.array(steps), np.array(y, dtype=float))


def smoothing_width(cells: Sequence[Cell]) -> int:
    """Steps of the moving mean, the same for all curves of training; 1 = none."""
    longest = max(run.steps_done for run in all_runs(cells))
    return max(1, longest // SMOOTHING)


def cell_band(cell: Cell, key: str, width: int) -> Band | None:
    """The curves of a cell; None where no run has a value.

    Args:
        width: steps of the moving mean, not used for held-out metrics.
    """
    curves = [run_curve(run, key) for run in cell.runs]
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves:
        return None
    if is_held_out(key):
        return band_of(curves)
    # Smoothed first: the width of the mean is in steps, not in points of a thinned curve.
    smoothed = [Curve(curve.x, moving_mean(curve.y, width)) for curve in curves]
    band = band_of([thinned(curve) for curve in smoothed])
    if len(curves) > 1 or width == 1:
        return band
    return replace(band, raw=thinned(curves[0]))


def band_of(curves: Sequence[Curve]) -> Band:
    """Over the curves that have a value at a position; NaN where none has.

    Example: steps 0, 10 with values 1, 2 and steps 10, 20 with 4, 6 make the table ::

        x   0  10  20
            1   2   -
            -   4   6
    """
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    table = np.full((len(curves), len(x)), np.nan)
    for row, curve in zip(table, curves, strict=True):
        row[np.searchsorted(x, curve.x)] = curve.y
    some = np.isfinite(table).any(axis=0)  # numpy warns of the median of a column of NaN
    median = np.full(len(x), np.nan)
    low = median.copy()
    high = median.copy()
    median[some] = np.nanmedian(table[:, some], axis=0)
    low[some] = np.nanmin(table[:, some], axis=0)
    high[some] = np.nanmax(table[:, some], axis=0)
    return Band(x, median, low, high, tuple(curves))


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite values of up to ``width // 2`` neighbors on either side; a gap stays."""
    half = width // 2
    smoothed = values.copy()
    for index in np.flatnonzero(np.isfinite(values)):
        smoothed[index] = np.nanmean(values[max(0, index - half) : index + half + 1])
    return smoothed


def thinned(curve: Curve) -> Curve:
    """At most ``MAX_POINTS`` points: means over equal stretches of steps, a gap where no step of a
    stretch has a value."""
    count = len(curve.x)
    if count <= MAX_POINTS:
        return curve
    stretch = ceil(count / MAX_POINTS)
    parts = [slice(first, first + stretch) for first in range(0, count, stretch)]
    x = [float(curve.x[part].mean()) for part in parts]
    y = [_finite_mean(curve.y[part]) for part in parts]
    return Curve(np.array(x), np.array(y))


def pass_curve(run: Run) -> Curve | None:
    """pass@k over k at the last evaluation: that after the training where there is one, else that
    of the training; None where it has fewer than two k."""
    for rows in (run.evaluation, run.rows):
        row = _last_with_several_k(rows)
        if row is not None:
            ks = pass_at_ks([row])
            values = [float(row[f"{PASS_AT}{k}"] or 0.0) for k in ks]
            return Curve(np.array(ks, dtype=float), np.array(values))
    return None


def pass_band(cell: Cell) -> Band | None:
    """pass@k over k of the runs of a cell; None where none has several k."""
    curves = [curve for run in cell.counted if (curve := pass_curve(run)) is not None]
    return band_of(curves) if curves else None


def _last_with_several_k(rows: Sequence[Row]) -> Row | None:
    fitting = [row for row in rows if len(pass_at_ks([row])) > 1]
    return fitting[-1] if fitting else None


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
