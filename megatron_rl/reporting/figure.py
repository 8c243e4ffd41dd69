"""The figure of a run; figures of several runs are made of the same parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from megatron_rl.errors import shortened
from megatron_rl.reporting.metrics_file import PASS_AT, Row, is_held_out, pass_at_ks, read_metrics
from megatron_rl.reporting.panels import OVER_K, Panel, panels_of

Style = Mapping[str, Any]  # of a line, as matplotlib takes it
Draw = Callable[[Axes], None]

SMOOTHING = 20  # a curve of training is a moving mean over 1 / SMOOTHING of its steps
FIRST_STYLE: Style = {"color": "#000000", "linestyle": (0, ()), "marker": "o", "linewidth": 1.8}
UNSMOOTHED: Style = {"alpha": 0.25, "linewidth": 0.8}
_MARKS = 7  # on a curve of training
_HELD_OUT_MARKS = 16
_PANEL_SIZE = (4.4, 3.0)  # inches
_MAX_TITLE = 44  # characters above one set of axes
# A label may hold a dollar sign, which is no mathematics.
_RC: dict[Any, Any] = {"text.parse_math": False, "font.size": 9.0, "axes.titlesize": 10.0}


@dataclass(frozen=True)
class Curve:
    """Positions on the x axis, ascending, and a value at each; NaN is a gap."""

    x: np.ndarray
    y: np.ndarray


def draw_curves(metrics_jsonl: Path, out: Path) -> None:
    """Draws all curves of one run into ``out``, a PNG, named after the run's folder.

    Raises:
        ValueError: no metrics file, or nothing in it to draw.
    """
    rows = read_metrics(metrics_jsonl)
    panels = panels_of(rows)
    if not panels:
        raise ValueError(
            f"{metrics_jsonl}: has none of the metrics of the figure; let the run finish a step"
        )
    width = smoothing_width(int(rows[-1]["step"] or 0))
    draws = {panel: partial(_draw_run, rows=rows, key=panel.key, width=width) for panel in panels}
    write_png(draws, {metrics_jsonl.resolve().parent.name: FIRST_STYLE}, out)


def smoothing_width(num_steps: int) -> int:
    """Steps of the moving mean, the same for all curves of training; 1 = none."""
    return max(1, num_steps // SMOOTHING)


def curve_of(rows: Sequence[Row], key: str) -> Curve:
    """The rows that have ``key``; of a metric of training all steps after 0, which is before
    training, so that a row without it is a gap too; of ``OVER_K`` the last row with several k."""
    if key == OVER_K:
        several = [row for row in rows if len(pass_at_ks([row])) > 1][-1:]
        points = [(k, row[f"{PASS_AT}{k}"]) for row in several for k in pass_at_ks([row])]
    elif is_held_out(key):
        points = [(row["step"], row[key]) for row in rows if key in row]
    else:
        points = [(row["step"], row.get(key)) for row in rows if row["step"]]
    # None, for what is missing or was not finite, becomes NaN.
    return Curve(*np.array(points, dtype=float).reshape(-1, 2).T)


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite values of up to ``width // 2`` neighbors on either side; a gap stays."""
    half = width // 2
    smoothed = values.copy()
    for index in np.flatnonzero(np.isfinite(values)):
        smoothed[index] = np.nanmean(values[max(0, index - half) : index + half + 1])
    return smoothed


def _draw_run(axes: Axes, rows: Sequence[Row], key: str, width: int) -> None:
    curve = curve_of(rows, key)
    held_out = is_held_out(key)
    if not held_out and width > 1:
        axes.plot(curve.x, curve.y, **UNSMOOTHED, color=FIRST_STYLE["color"])
        curve = replace(curve, y=moving_mean(curve.y, width))
    draw_line(axes, curve, FIRST_STYLE, held_out=held_out)


def draw_line(axes: Axes, curve: Curve, style: Style, *, held_out: bool, order: int = 0) -> None:
    """A curve with markers, whose places differ between lines of another ``order``."""
    # Finite values between two gaps get a point: a line has nothing to draw there.
    finite = np.isfinite(curve.y)
    padded = np.pad(finite, 1)
    alone = finite & ~padded[:-2] & ~padded[2:]
    axes.plot(curve.x[alone], curve.y[alone], "o", color=style["color"], markersize=2)
    # 70 steps, 7 marks: the first line has its marks at 0, 10, 20, ..., the next at 2, 12, ...
    every = max(1, len(curve.x) // (_HELD_OUT_MARKS if held_out else _MARKS))
    axes.plot(curve.x, curve.y, **style, markersize=4.5, markevery=(order * 2 % every, every))


def write_png(
    draws: Mapping[Panel, Draw],
    styles: Mapping[str, Style],
    path: Path,
    size: tuple[float, float] = _PANEL_SIZE,
    max_columns: int = 3,
) -> None:
    """All panels, of ``size``, in one file, with the legend, ``styles`` by label, on top."""
    columns = min(max_columns, max(len(draws), 2))  # the legend needs two
    rows = ceil(len(draws) / columns)
    legend_columns = len(styles) if len(styles) <= 4 else 3
    legend_height = 0.25 * ceil(len(styles) / legend_columns) + 0.15
    with matplotlib.rc_context(_RC):
        figure = Figure((size[0] * columns, size[1] * rows + legend_height), 110)
        figure.set_layout_engine("constrained")
        FigureCanvasAgg(figure)  # needs no display, and leaves pyplot's global state alone
        figure.legend(
            [Line2D([], [], **style) for style in styles.values()],
            list(styles),
            loc="outside upper center",
            ncols=legend_columns,
            frameon=False,
            handlelength=4,
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(draws) :]:
            axes.set_visible(False)
        # The last row may be short.
        for axes, (panel, draw) in zip(grid.flat, draws.items(), strict=False):
            draw(axes)
            _finish(axes, panel)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib, so that the same runs give the same bytes.
        figure.savefig(path, format="png", metadata={"Software": None})


def _finish(axes: Axes, panel: Panel) -> None:
    """Title, labels, ticks and limits, after the lines."""
    # A title stays off the next axes: the data source, after the colon, may be long.
    title = panel.title if len(panel.title) <= _MAX_TITLE else panel.title.replace(": ", ":\n", 1)
    lines = [shortened(line, _MAX_TITLE) for line in title.split("\n")]
    axes.set_title("\n".join(lines), loc="left", parse_math=False)
    axes.set_xlabel(panel.axis)
    axes.set_ylabel(panel.label, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if high == 0 and low == 0:  # nothing but zeros, of what is a share most of the time
        axes.set_ylim(0, 1)
    elif 0 <= low < high / 2:  # values that are not negative begin at zero where that is near
        axes.set_ylim(bottom=0)
    if panel.axis != "step":
        # After the scale, which sets locators and formatter of its own: ticks at the k alone,
        # written 8 and not 2^3.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(np.unique(np.concatenate([line.get_xdata() for line in axes.lines])))
        axes.xaxis.set_major_formatter(ScalarFormatter())
