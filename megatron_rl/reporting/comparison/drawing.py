"""Figures of variants, in colors that people with defective color vision tell apart."""

from collections.abc import Sequence
from dataclasses import dataclass
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

from megatron_rl.reporting.comparison.curves import Band

Dash = tuple[float, tuple[float, ...]]  # offset, lengths on and off in points

_INK = "#000000"  # text and the baseline
# Okabe and Ito 2008, Color Universal Design, without yellow, which a white page swallows.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SOLID: Dash = (0.0, ())
_DASHES = (_SOLID, (0.0, (6.0, 1.5)), (0.0, (1.5, 1.2)), (0.0, (6.0, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*", "p")
_MARKS = 7  # on a curve of training
_HELD_OUT_MARKS = 16
MAX_BANDS = 4  # variants whose bands can be told apart in one set of axes
MAX_SINGLES = 10  # runs whose single curves can
_PANEL_SIZE = (4.4, 3.0)  # inches
_LARGE_SIZE = (6.6, 4.2)
_MANY = 6  # variants; panels of more are larger
_MAX_TITLE = 44  # characters above one set of axes
# A label may hold a dollar sign, which is no mathematics.
_RC: dict[Any, Any] = {"text.parse_math": False, "font.size": 9.0, "axes.titlesize": 10.0}


@dataclass(frozen=True)
class Drawing:
    """One set of axes."""

    title: str
    label: str  # of the y axis
    bands: Sequence[Band | None]  # one a variant, None where it has no value
    held_out: bool
    axis: str = "step"  # label of the x axis; ``step``, or one of powers of 2


def style_of(order: int) -> dict[str, Any]:
    """The line of the variant at this place, as matplotlib takes it; the same in every figure.

    The first, the baseline, has the color of the text; of the others colors and dashes together
    repeat after 24, and markers before that.
    """
    # Dashes advance with the colors, so that neighbors differ in both, and are moved by one at each
    # turn of the colors: variants 1 and 7 are both blue, with dash 0 and dash 1.
    turn, color = divmod(order - 1, len(_COLORS))
    return {
        "color": _COLORS[color] if order else _INK,
        "linestyle": _DASHES[(color + turn) % len(_DASHES)] if order else _SOLID,
        "marker": _MARKERS[order % len(_MARKERS)],
        "linewidth": 1.8,
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
        _draw_median(axes, band, order, _HELD_OUT_MARKS if held_out else _MARKS)


def _draw_spread(axes: Axes, band: Band, color: str, with_range: bool, with_singles: bool) -> None:
    if band.raw is not None:
        axes.plot(band.raw.x, band.raw.y, color=color, alpha=0.25, linewidth=0.8)
    if len(band.singles) < 2:
        return
    if with_range:
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    for curve in band.singles if with_singles else ():
        axes.plot(curve.x, curve.y, color=color, alpha=0.3, linewidth=0.8)


def _draw_median(axes: Axes, band: Band, order: int, num_marks: int) -> None:
    """The median with markers, whose places differ between variants."""
    # Finite values between two gaps get a point: a line has nothing to draw there.
    finite = np.isfinite(band.median)
    padded = np.pad(finite, 1)
    alone = finite & ~padded[:-2] & ~padded[2:]
    axes.plot(band.x[alone], band.median[alone], "o", color=style_of(order)["color"], markersize=2)
    # 70 steps, 7 marks: the first variant has its marks at 0, 10, 20, ..., the next at 2, 12, ...
    every = max(1, len(band.x) // num_marks)
    axes.plot(
        band.x, band.median, **style_of(order), markersize=4.5, markevery=(order * 2 % every, every)
    )


def write_png(drawings: Sequence[Drawing], labels: Sequence[str], path: Path) -> None:
    """All drawings in one file, with the legend of all variants on top."""
    size = _LARGE_SIZE if len(labels) > _MANY else _PANEL_SIZE
    columns = 2 if len(labels) > _MANY else min(3, max(len(drawings), 2))  # the legend needs two
    rows = ceil(len(drawings) / columns)
    legend_columns = len(labels) if len(labels) <= 4 else 3
    legend_height = 0.25 * ceil(len(labels) / legend_columns) + 0.15
    with matplotlib.rc_context(_RC):
        figure = Figure((size[0] * columns, size[1] * rows + legend_height), 110)
        figure.set_layout_engine("constrained")
        FigureCanvasAgg(figure)  # needs no display, and leaves pyplot's global state alone
        figure.legend(
            [Line2D([], [], **style_of(order)) for order in range(len(labels))],
            labels,
            loc="outside upper center",
            ncols=legend_columns,
            frameon=False,
            handlelength=4,
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(drawings) :]:
            axes.set_visible(False)
        for axes, drawing in zip(grid.flat, drawings, strict=False):  # the last row may be short
            _draw(axes, drawing)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib, so that the same runs give the same bytes.
        figure.savefig(path, format="png", metadata={"Software": None})


def _draw(axes: Axes, drawing: Drawing) -> None:
    draw_bands(axes, drawing.bands, held_out=drawing.held_out)
    axes.set_title(_fitted(drawing.title), loc="left", parse_math=False)
    axes.set_xlabel(drawing.axis)
    axes.set_ylabel(drawing.label, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if high == 0 and low == 0:  # nothing but zeros, of what is a share most of the time
        axes.set_ylim(0, 1)
    elif 0 <= low < high / 2:  # values that are not negative begin at zero where that is near
        axes.set_ylim(bottom=0)
    if drawing.axis != "step":
        # After the scale, which sets locators and formatter of its own: ticks at the k alone,
        # written 8 and not 2^3.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(np.unique(np.concatenate([band.x for band in drawing.bands if band])))
        axes.xaxis.set_major_formatter(ScalarFormatter())


def _fitted(title: str) -> str:
    """A title that stays off the next axes: the data source, after the colon, may be long."""
    lines = [title] if len(title) <= _MAX_TITLE else title.replace(": ", ":\n", 1).split("\n")
    return "\n".join(
        line if len(line) <= _MAX_TITLE else f"{line[: _MAX_TITLE - 3]}..." for line in lines
    )
