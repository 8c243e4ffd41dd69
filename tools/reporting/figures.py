"""Curves of variants, in colors that people with defective color vision tell apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from megatron_rl.reporting.figure import (
    FIRST_STYLE,
    UNSMOOTHED,
    Curve,
    Draw,
    Style,
    curve_of,
    draw_line,
    moving_mean,
    write_png,
)
from megatron_rl.reporting.metrics_file import is_held_out
from megatron_rl.reporting.panels import OVER_K, Panel, panels_of
from tools.reporting.variants import Variant, all_runs

# Okabe and Ito 2008, Color Universal Design, without yellow, which a white page swallows; the
# baseline has the black of the text.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Offset, lengths on and off in points.
_DASHES = ((0, ()), (0.0, (6.0, 1.5)), (0.0, (1.5, 1.2)), (0.0, (6.0, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*", "p")
MAX_BANDS = 4  # variants whose bands can be told apart in one set of axes
MAX_SINGLES = 10  # runs whose single curves can
_MANY = 6  # variants; panels of more are larger
_LARGE_SIZE = (6.6, 4.2)  # inches


@dataclass(frozen=True)
class Band:
    """Spread of a variant: median, smallest and largest value of its runs with one at ``x``."""

    x: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    singles: tuple[Curve, ...]  # the curve of each run
    raw: Curve | None = None  # of a variant with one run, its values before smoothing


def draws_of(variants: Sequence[Variant], width: int) -> dict[Panel, Draw]:
    """All that the runs have values for.

    Args:
        width: steps of the moving mean of curves of training.
    """
    runs = all_runs(variants)
    trained = [row for run in runs for row in run.rows]
    draws = {}
    for panel in panels_of(trained, [row for run in runs for row in run.evaluation]):
        bands = [variant_band(variant, panel.key, width) for variant in variants]
        if any(bands):
            draws[panel] = partial(draw_bands, bands=bands, held_out=is_held_out(panel.key))
    return draws


def variant_band(variant: Variant, key: str, width: int) -> Band | None:
    """The curves of a variant; None where no run has a value.

    Args:
        width: steps of the moving mean, not used for held-out metrics.
    """
    if key == OVER_K:  # the last evaluation: that after the training where there is one
        curves = [curve_of([*run.rows, *run.evaluation], key) for run in variant.counted]
    else:
        curves = [curve_of(run.rows_of(key), key) for run in variant.runs]
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves:
        return None
    if is_held_out(key):
        return band_of(curves)
    band = band_of([replace(curve, y=moving_mean(curve.y, width)) for curve in curves])
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


def write_figure(draws: Mapping[Panel, Draw], labels: Sequence[str], path: Path) -> None:
    """All panels in one PNG, with the legend of all variants on top."""
    styles = dict(zip(labels, map(style_of, range(len(labels))), strict=True))
    write_png(draws, styles, path, *((_LARGE_SIZE, 2) if len(labels) > _MANY else ()))


def style_of(order: int) -> Style:
    """The line of the variant at this place, the same in every figure.

    The first, the baseline, has the color of the text; of the others colors and dashes together
    repeat after 24, and markers before that.
    """
    # Dashes advance with the colors, so that neighbors differ in both, and are moved by one at each
    # turn of the colors: variants 1 and 7 are both blue, with dash 0 and dash 1.
    if not order:
        return FIRST_STYLE
    turn, color = divmod(order - 1, len(_COLORS))
    return {
        **FIRST_STYLE,
        "color": _COLORS[color],
        "linestyle": _DASHES[(color + turn) % len(_DASHES)],
        "marker": _MARKERS[order % len(_MARKERS)],
    }


def draw_bands(axes: Axes, bands: Sequence[Band | None], *, held_out: bool) -> None:
    """Medians strong; ranges and single runs faint, where few enough to be told apart."""
    # A variant keeps its style in every figure, so its place is counted among all of them.
    present = [(order, band) for order, band in enumerate(bands) if band is not None]
    with_range = len(present) <= MAX_BANDS
    with_singles = sum(len(band.singles) for _, band in present) <= MAX_SINGLES
    for order, band in present:
        _draw_spread(axes, band, style_of(order)["color"], with_range, with_singles)
    for order, band in present:  # above the spread of all variants
        median = Curve(band.x, band.median)
        draw_line(axes, median, style_of(order), held_out=held_out, order=order)


def _draw_spread(axes: Axes, band: Band, color: str, with_range: bool, with_singles: bool) -> None:
    if band.raw is not None:
        axes.plot(band.raw.x, band.raw.y, **UNSMOOTHED, color=color)
    if len(band.singles) < 2:
        return
    if with_range:
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    for curve in band.singles if with_singles else ():
        axes.plot(curve.x, curve.y, color=color, alpha=0.3, linewidth=0.8)
