"""The figures of a comparison: each panel as SVG for the page, each heading as PNG beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from megatron_rl.reporting.comparison.cells import Cell
from megatron_rl.reporting.comparison.curves import (
    Band,
    cell_band,
    pass_band,
    smoothing_width,
)
from megatron_rl.reporting.comparison.drawing import (
    INK,
    MAX_BANDS,
    Drawn,
    draw_cells,
    draw_median,
    draw_spread,
    finish,
    legend_line,
    show_zero,
    style_of,
)
from megatron_rl.reporting.comparison.panels import HEADINGS, PASS, panels_of
from megatron_rl.reporting.comparison.svg import inline_svg

_PANEL_SIZE = (4.4, 3.0)  # inches
_LARGE_SIZE = (6.6, 4.2)
MANY = 6  # cells; panels of more are larger
_FACET_COLUMNS = 4
_FACETS = ("eval/accuracy", "reward/mean")  # shown cell by cell where bands cannot be told apart
_PNG_DPI = 110
_MAX_TITLE = 44  # characters above one set of axes
# A label may hold a dollar sign, which is no mathematics. Text is text in SVG, not shapes.
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9.0,
    "axes.titlesize": 10.0,
}


@dataclass(frozen=True)
class Picture:
    """One set of axes, or the facets of a metric, ready to be drawn.

    ``axis``: the label of the x axis; ``faceted``: one set of axes for each cell.
    """

    title: str
    label: str
    heading: str
    cells: tuple[Drawn, ...]
    held_out: bool
    axis: str = "step"
    faceted: bool = False


@dataclass(frozen=True)
class InlineFigure:
    """A picture as text for a page."""

    title: str
    svg: str


def pictures_of(cells: Sequence[Cell]) -> list[Picture]:
    """All that the runs have values for, by heading."""
    width = smoothing_width(cells)
    pictures = []
    for panel in panels_of(cells):
        drawn = _drawn(cells, partial(cell_band, key=panel.key, width=width))
        pictures.append(Picture(panel.title, panel.label, panel.heading, drawn, panel.held_out))
        if panel.key in _FACETS and len(drawn) > MAX_BANDS:
            title = f"{panel.title}, cell by cell (gray: {cells[0].label})"
            pictures.append(
                Picture(title, panel.label, panel.heading, drawn, panel.held_out, faceted=True)
            )
    over_k = _drawn(cells, pass_band)
    if over_k:
        title = "pass@k over k, last evaluation"
        pictures.append(
            Picture(title, "share of prompts", PASS, over_k, True, axis="k (responses)")
        )
    # Facets, which take the whole width of a page, after the small panels of their heading.
    return sorted(pictures, key=lambda picture: (HEADINGS.index(picture.heading), picture.faceted))


def as_svg(picture: Picture, name: str) -> InlineFigure:
    """The picture for a page. ``name``: unique in it; ids of the figure begin with it."""
    # matplotlib makes ids within a figure of the salt, at random without one.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        if picture.faceted:
            figure = _facets(picture)
        else:
            size = _LARGE_SIZE if len(picture.cells) > MANY else _PANEL_SIZE
            figure = Figure(figsize=size, layout="constrained")
            _draw(figure.subplots(), picture)
        return InlineFigure(picture.title, inline_svg(figure, name, picture.title))


def legend_svg(order: int) -> str:
    """What stands for the cell at this place in the legend of a page."""
    name = f"key{order}"
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(0.6, 0.2))
        axes = figure.add_axes((0.05, 0.05, 0.9, 0.9))
        axes.add_line(legend_line(style_of(order)))
        axes.set_xlim(-0.1, 1.1)
        axes.set_ylim(-1, 1)
        axes.set_axis_off()
        return inline_svg(figure, name, "")


def write_png(pictures: Sequence[Picture], cells: Sequence[Cell], path: Path) -> None:
    """Pictures of one heading in one file, with the legend of all cells on top."""
    flat = [picture for picture in pictures if not picture.faceted]
    if len(cells) > MANY:
        size = _LARGE_SIZE
        columns = 2
    else:
        size = _PANEL_SIZE
        columns = min(3, max(len(flat), 2))  # the legend needs the width of two panels
    rows = ceil(len(flat) / columns)
    legend_columns = len(cells) if len(cells) <= 4 else 3
    legend_rows = ceil(len(cells) / legend_columns)
    width = size[0] * columns
    height = size[1] * rows + 0.25 * legend_rows + 0.15
    with matplotlib.rc_context(_STYLE):
        figure = Figure((width, height), _PNG_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.legend(
            [legend_line(style_of(order)) for order in range(len(cells))],
            [cell.label for cell in cells],
            loc="outside upper center",
            ncols=legend_columns,
            frameon=False,
            handlelength=4,
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(flat) :]:
            axes.set_visible(False)
        for axes, picture in zip(grid.flat, flat, strict=False):
            _draw(axes, picture)
            axes.set_title(_fitted(picture.title), loc="left", parse_math=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib, so that the same runs give the same bytes.
        figure.savefig(path, format="png", metadata={"Software": None})


def _fitted(title: str) -> str:
    """A title that does not reach into the next axes: a data source, behind the colon, may have a
    long name."""
    lines = [title]
    if len(title) > _MAX_TITLE:
        metric, colon, source = title.partition(": ")
        lines = [f"{metric}:", source] if colon else [title]
    cut = [line if len(line) <= _MAX_TITLE else f"{line[: _MAX_TITLE - 3]}..." for line in lines]
    return "\n".join(cut)


def _drawn(cells: Sequence[Cell], band_of: Callable[[Cell], Band | None]) -> tuple[Drawn, ...]:
    """The cells that have a band. A cell keeps its style in every figure, so its place is counted
    among all of them."""
    drawn = []
    for order, cell in enumerate(cells):
        band = band_of(cell)
        if band is not None:
            drawn.append(Drawn(cell.label, style_of(order), band, order))
    return tuple(drawn)


def _draw(axes: Axes, picture: Picture) -> None:
    draw_cells(axes, picture.cells, held_out=picture.held_out)
    finish(axes, picture.axis, picture.label)
    show_zero([axes])
    if picture.axis != "step":
        ks: set[float] = set()
        for cell in picture.cells:
            ks.update(cell.band.x.tolist())
        # After the scale, which sets locators and formatter of its own: ticks at the k alone,
        # written 8 and not 2^3.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sorted(ks))
        axes.xaxis.set_major_formatter(ScalarFormatter())


def _facets(picture: Picture) -> Figure:
    """One set of axes a cell, with its band and runs; the median of the first in gray."""
    cells = picture.cells
    rows = ceil(len(cells) / _FACET_COLUMNS)
    figure = Figure((3.0 * _FACET_COLUMNS, 2.2 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, _FACET_COLUMNS, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(cells) :]:
        axes.set_visible(False)
    first = cells[0].band
    for index, (axes, cell) in enumerate(zip(grid.flat, cells, strict=False)):
        axes.plot(first.x, first.median, color="#888888", linewidth=1.4)
        draw_spread(axes, cell, bands=True, singles=True)
        draw_median(axes, cell, num_marks=0)
        is_lowest = index + _FACET_COLUMNS >= len(cells)  # of its column: none stands below it
        is_left = index % _FACET_COLUMNS == 0
        finish(axes, picture.axis if is_lowest else "", picture.label if is_left else "")
        axes.tick_params(labelbottom=is_lowest, labelleft=is_left)
        axes.set_title(cell.label, loc="left", parse_math=False, fontsize=9)
    show_zero(grid.flat[: len(cells)].tolist())
    return figure
