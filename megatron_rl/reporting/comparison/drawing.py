"""Bands of variants on axes, in colors that people with defective color vision tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

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


@dataclass(frozen=True)
class Style:
    """Color, dash and marker of a variant, the same in every figure."""

    color: str
    dash: Dash
    marker: str


@dataclass(frozen=True)
class Drawn:
    """A variant's band and how it is drawn.

    Attributes:
        order: its place in the legend.
    """

    label: str
    style: Style
    band: Band
    order: int


def style_of(order: int) -> Style:
    """The style of the variant at this place. The first, the baseline, has the color of the text;
    of the others colors and dashes together repeat after 24, and markers before that."""
    if order == 0:
        return Style(_INK, _SOLID, _MARKERS[0])
    # Dashes advance with the colors, so that neighbors differ in both, and are moved by one at each
    # turn of the colors: variants 1 and 7 are both blue, with dash 0 and dash 1.
    turn, color = divmod(order - 1, len(_COLORS))
    dash = _DASHES[(color + turn) % len(_DASHES)]
    return Style(_COLORS[color], dash, _MARKERS[order % len(_MARKERS)])


def draw_variants(axes: Axes, variants: Sequence[Drawn], *, held_out: bool) -> None:
    """Medians strong; bands and single runs faint, where few enough to be told apart."""
    bands = len(variants) <= MAX_BANDS
    singles = sum(len(variant.band.singles) for variant in variants) <= MAX_SINGLES
    for variant in variants:
        _draw_spread(axes, variant, bands=bands, singles=singles)
    for variant in variants:  # above the spread of all variants
        _draw_median(axes, variant, _HELD_OUT_MARKS if held_out else _MARKS)


def _draw_spread(axes: Axes, variant: Drawn, *, bands: bool, singles: bool) -> None:
    """Draws the range and the single runs of a variant."""
    band = variant.band
    color = variant.style.color
    if band.raw is not None:
        axes.plot(band.raw.x, band.raw.y, color=color, alpha=0.25, linewidth=0.8)
    if len(band.singles) < 2:
        return
    if bands:
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    if singles:
        for curve in band.singles:
            axes.plot(curve.x, curve.y, color=color, alpha=0.3, linewidth=0.8)


def _draw_median(axes: Axes, variant: Drawn, num_marks: int) -> None:
    """Draws the median of a variant with markers, whose places differ between variants."""
    x = variant.band.x
    median = variant.band.median
    alone = _alone(median)
    axes.plot(x[alone], median[alone], "o", color=variant.style.color, markersize=2)
    # 70 steps, 7 marks: the first variant has its marks at 0, 10, 20, ..., the next at 2, 12, ...
    every = max(1, len(x) // num_marks)
    axes.plot(
        x,
        median,
        color=variant.style.color,
        linestyle=variant.style.dash,
        linewidth=1.8,
        marker=variant.style.marker,
        markersize=4.5,
        markevery=(variant.order * 2 % every, every),
    )


def _alone(values: np.ndarray) -> np.ndarray:
    """A mask of finite values between two gaps, where a line has nothing to draw."""
    finite = np.isfinite(values)
    before = np.concatenate([[False], finite[:-1]])
    after = np.concatenate([finite[1:], [False]])
    return finite & ~before & ~after


def finish(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels, ticks and grid."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def show_zero(axes: Axes) -> None:
    """Values that are not negative begin at zero where that is near."""
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if high == 0 and low == 0:  # nothing but zeros, of what is a share most of the time
        axes.set_ylim(0, 1)
    elif 0 <= low < high / 2:
        axes.set_ylim(bottom=0)


def legend_line(style: Style) -> Line2D:
    """The line of a variant in a legend."""
    return Line2D(
        [0, 1],
        [0, 0],
        color=style.color,
        linestyle=style.dash,
        linewidth=1.8,
        marker=style.marker,
        markersize=5,
    )
