"""The figures of a comparison, one PNG a heading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from megatron_rl.reporting.comparison.curves import (
    Band,
    pass_band,
    smoothing_width,
    variant_band,
)
from megatron_rl.reporting.comparison.drawing import (
    Drawn,
    draw_variants,
    finish,
    legend_line,
    show_zero,
    style_of,
)
from megatron_rl.reporting.comparison.panels import PASS, panels_of
from megatron_rl.reporting.comparison.variants import Variant

_PANEL_SIZE = (4.4, 3.0)  # inches
_LARGE_SIZE = (6.6, 4.2)
_MANY = 6  # variants; panels of more are larger
_PNG_DPI = 110
_MAX_TITLE = 44  # characters above one set of axes
# A label may hold a dollar sign, which is no mathematics.
_STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 9.0, "axes.titlesize": 10.0}


@dataclass(frozen=True)
class DrawnPanel:
    """One set of axes with the curves of all variants that have a value.

    Attributes:
        label: of the y axis.
        axis: label of the x axis.
    """

    title: str
    label: str
    heading: str
    variants: tuple[Drawn, ...]
    held_out: bool
    axis: str = "step"


def panels_to_draw(variants: Sequence[Variant]) -> list[DrawnPanel]:
    """All that the runs have values for; pass@k over k is the last of them."""
    width = smoothing_width(variants)
    panels = []
    for panel in panels_of(variants):
        drawn = _drawn([variant_band(variant, panel.key, width) for variant in variants], variants)
        panels.append(DrawnPanel(panel.title, panel.label, panel.heading, drawn, panel.held_out))
    over_k = _drawn([pass_band(variant) for variant in variants], variants)
    if over_k:
        title = "pass@k over k, last evaluation"
        panels.append(DrawnPanel(title, "share of prompts", PASS, over_k, True, "k (responses)"))
    return panels


def write_png(panels: Sequence[DrawnPanel], variants: Sequence[Variant], path: Path) -> None:
    """Panels of one heading in one file, with the legend of all variants on top."""
    if len(variants) > _MANY:
        size = _LARGE_SIZE
        columns = 2
    else:
        size = _PANEL_SIZE
        columns = min(3, max(len(panels), 2))  # the legend needs the width of two panels
    rows = ceil(len(panels) / columns)
    legend_columns = len(variants) if len(variants) <= 4 else 3
    legend_rows = ceil(len(variants) / legend_columns)
    width = size[0] * columns
    height = size[1] * rows + 0.25 * legend_rows + 0.15
    with matplotlib.rc_context(_STYLE):
        figure = Figure((width, height), _PNG_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.legend(
            [legend_line(style_of(order)) for order in range(len(variants))],
            [variant.label for variant in variants],
            loc="outside upper center",
            ncols=legend_columns,
            frameon=False,
            handlelength=4,
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw(axes, panel)
            axes.set_title(_fitted(panel.title), loc="left", parse_math=False)
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


def _drawn(bands: Sequence[Band | None], variants: Sequence[Variant]) -> tuple[Drawn, ...]:
    """The variants that have a band. A variant keeps its style in every figure, so its place is
    counted among all of them."""
    drawn = []
    for order, (variant, band) in enumerate(zip(variants, bands, strict=True)):
        if band is not None:
            drawn.append(Drawn(variant.label, style_of(order), band, order))
    return tuple(drawn)


def _draw(axes: Axes, panel: DrawnPanel) -> None:
    draw_variants(axes, panel.variants, held_out=panel.held_out)
    finish(axes, panel.axis, panel.label)
    show_zero(axes)
    if panel.axis != "step":
        ks: set[float] = set()
        for variant in panel.variants:
            ks.update(variant.band.x.tolist())
        # After the scale, which sets locators and formatter of its own: ticks at the k alone,
        # written 8 and not 2^3.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sorted(ks))
        axes.xaxis.set_major_formatter(ScalarFormatter())
