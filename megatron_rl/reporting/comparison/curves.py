"""Values over steps of a run and of a variant, with gaps where a value is missing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.reporting.comparison.runs import Run
from megatron_rl.reporting.comparison.variants import Variant, all_runs
from megatron_rl.reporting.metrics_file import PASS_AT, is_held_out, moving_mean, pass_at_ks

SMOOTHING = 20  # a curve of training is a moving mean over 1 / SMOOTHING of its steps


@dataclass(frozen=True)
class Curve:
    """Positions on the x axis, ascending, and a value at each; NaN is a gap."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Band:
    """Spread of a variant: median, smallest and largest value of its runs with one at ``x``."""

    x: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    singles: tuple[Curve, ...]  # the curve of each run
    raw: Curve | None = None  # of a variant with one run, its values before smoothing


def run_curve(run: Run, key: str) -> Curve:
    """The rows of the run that have ``key``; of a metric of training all of its steps, so that a
    row without it is a gap too."""
    if is_held_out(key):
        rows = [row for row in run.rows_of(key) if key in row]
    else:
        rows = [row for row in run.rows if row["step"]]  # step 0 is before training
    # None, for what is missing or was not finite, becomes NaN.
    steps = np.array([row["step"] for row in rows], dtype=float)
    return Curve(steps, np.array([row.get(key) for row in rows], dtype=float))


def smoothing_width(variants: Sequence[Variant]) -> int:
    """Steps of the moving mean, the same for all curves of training; 1 = none."""
    longest = max(run.steps_done for run in all_runs(variants))
    return max(1, longest // SMOOTHING)


def variant_band(variant: Variant, key: str, width: int) -> Band | None:
    """The curves of a variant; None where no run has a value.

    Args:
        width: steps of the moving mean, not used for held-out metrics.
    """
    curves = [run_curve(run, key) for run in variant.runs]
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves:
        return None
    if is_held_out(key):
        return band_of(curves)
    band = band_of([Curve(curve.x, moving_mean(curve.y, width)) for curve in curves])
    return band if len(curves) > 1 or width == 1 else replace(band, raw=curves[0])


def band_of(curves: Sequence[Curve]) -> Band:
    """The median and range over the curves that have a value at a position; NaN where none has.

    Example: steps 0, 10 with values 1, 2 and steps 10, 20 with 4, 6 make the table ::

        x   0  10  20
            1   2   -
            -   4   6
    """
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    table = np.full((len(curves), len(x)), np.nan)
    for row, curve in zip(table, curves, strict=True):
        row[np.searchsorted(x, curve.x)] = curve.y
    median, low, high = np.full((3, len(x)), np.nan)
    some = np.isfinite(table).any(axis=0)  # numpy warns of the median of a column of NaN
    median[some] = np.nanmedian(table[:, some], axis=0)
    low[some] = np.nanmin(table[:, some], axis=0)
    high[some] = np.nanmax(table[:, some], axis=0)
    return Band(x, median, low, high, tuple(curves))


def pass_band(variant: Variant) -> Band | None:
    """pass@k over k of the runs of a variant; None where none has several k."""
    curves = []
    for run in variant.counted:
        # The last evaluation: that after the training where there is one.
        rows = [row for row in (*run.rows, *run.evaluation) if len(pass_at_ks([row])) > 1]
        if rows:
            ks = pass_at_ks(rows[-1:])
            values = [float(rows[-1][f"{PASS_AT}{k}"] or 0.0) for k in ks]
            curves.append(Curve(np.array(ks, dtype=float), np.array(values)))
    return band_of(curves) if curves else None
