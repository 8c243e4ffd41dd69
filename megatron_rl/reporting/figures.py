"""The curves of a run as one figure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.reporting.evaluation import HIGH, LOW
from megatron_rl.reporting.metrics_file import (
    Row,
    is_held_out,
    moving_mean,
    read_metrics,
    series,
)
from megatron_rl.reporting.pass_at_k import pass_at_ks

_SMOOTHING_STEPS = 10
_COLORS = ("#1f5fa8", "#c4501b", "#3b8a4e")


@dataclass(frozen=True)
class _Panel:
    """One set of axes: the label of its y axis, and (metric key, label) of each curve."""

    y_label: str
    curves: tuple[tuple[str, str], ...]
    log: bool = False


@dataclass(frozen=True)
class _Curve:
    key: str
    label: str
    steps: list[int]
    values: list[float]


_PANELS = (
    _Panel("held-out accuracy", (("eval/accuracy", "accuracy"),)),
    _Panel("training reward", (("reward/mean", "mean reward"), ("reward/accuracy", "accuracy"))),
    _Panel(
        "response length [tokens]",
        (("rollout/response_tokens_mean", "mean"), ("rollout/response_tokens_max", "longest")),
    ),
    _Panel("entropy [nats]", (("rollout/entropy", "entropy"),)),
    _Panel(
        "trainer against sampler [nats]",
        (
            ("mismatch/logprob_abs_diff_max", "largest |logprob gap|"),
            ("mismatch/logprob_abs_diff_mean", "mean |logprob gap|"),
        ),
        log=True,
    ),
    _Panel("KL to the reference [nats]", (("kl/reference_mean", "KL"),)),
    _Panel("gradient norm", (("optim/grad_norm", "before clipping"),)),
    _Panel("throughput [response tokens/s]", (("throughput/response_tokens_per_s", "tokens/s"),)),
)


def draw_curves(metrics_jsonl: Path, out: Path, title: str | None = None) -> Path:
    """Draws the panels of which the run has a metric; returns ``out``.

    Training curves: each step faint, its moving mean over ``_SMOOTHING_STEPS`` steps strong.
    Held-out values: markers, joined, first and last written out.

    Args:
        out: the figure; its suffix gives the format, e.g. PNG.
        title: by default the name of the run's folder.

    Raises:
        ValueError: no metrics file, or nothing in it to draw.
    """
    rows = read_metrics(metrics_jsonl)
    drawn = [(panel, _curves(panel, rows)) for panel in _PANELS]
    panels = [(panel, curves) for panel, curves in drawn if curves]
    if not panels:
        raise ValueError(
            f"{metrics_jsonl}: has none of the metrics of the figure; let the run finish a step"
        )
    if title is None:
        title = metrics_jsonl.resolve().parent.name
    num_columns = min(4, len(panels))
    num_rows = ceil(len(panels) / num_columns)
    size = (4.2 * num_columns, 3.1 * num_rows + 0.5)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display, and leaves pyplot's global state alone
    figure.suptitle(title, fontsize=13, fontweight="bold")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, curves) in zip(grid.flat, panels, strict=False):  # the last row may be short
        _draw_panel(axes, panel, curves)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def draw_pass_at_k(metrics_jsonl: Path, out: Path) -> Path:
    """Draws pass@k of an evaluation; returns ``out``. Left over k, a curve for each step; right
    over steps, where there are several, a curve for each k. Bands: the bounds of 95 %.

    Raises:
        ValueError: no metrics file, or no pass@k in it.
    """
    rows = read_metrics(metrics_jsonl)
    ks = pass_at_ks(rows)
    if not ks:
        raise ValueError(f"{metrics_jsonl}: has no pass@k; give evaluation.pass_at")
    # [steps, ks, 3]: value, lower and upper bound
    values = np.stack([_bounded(row, ks) for row in rows])
    steps = [int(row["step"] or 0) for row in rows]
    num_panels = 2 if len(steps) > 1 else 1
    figure = Figure(figsize=(5.2 * num_panels, 3.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, num_panels, squeeze=False)[0])
    for step, of_step in zip(steps, values, strict=True):
        _draw_band(axes[0], ks, of_step, f"step {step}")
    axes[0].set_xscale("log", base=2)
    axes[0].set_xlabel("k")
    if num_panels > 1:
        for place, k in enumerate(ks):
            _draw_band(axes[1], steps, values[:, place], f"k = {k}")
        axes[1].set_xlabel("step")
    for each in axes:
        each.set_ylabel("pass@k")
        each.set_ylim(0, 1.05)
        each.legend(fontsize=8, frameon=False)
        each.grid(alpha=0.3)
    figure.savefig(out)
    return out


def _bounded(row: Row, ks: list[int]) -> np.ndarray:
    """[ks, 3]: value, lower and upper bound; NaN, which matplotlib leaves out, where there is
    none."""
    values = np.full((len(ks), 3), np.nan)
    for place, k in enumerate(ks):
        for column, prefix in enumerate(("eval/", LOW, HIGH)):
            value = row.get(f"{prefix}pass_at_{k}")
            if value is not None:
                values[place, column] = value
    return values


def _draw_band(axes: Axes, places: list[int], values: np.ndarray, label: str) -> None:
    middle, low, high = values.T
    (line,) = axes.plot(places, middle, marker="o", markersize=4, linewidth=1.4, label=label)
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _curves(panel: _Panel, rows: list[Row]) -> list[_Curve]:
    """The curves of which the run has values; one for equal metrics, as reward and accuracy."""
    curves: list[_Curve] = []
    for key, label in panel.curves:
        steps, values = series(rows, key)
        is_drawn = any(curve.values == values for curve in curves)
        if steps and not is_drawn:
            curves.append(_Curve(key, label, steps, values))
    return curves


def _draw_panel(axes: Axes, panel: _Panel, curves: list[_Curve]) -> None:
    for color, curve in zip(_COLORS, curves, strict=False):
        if is_held_out(curve.key):
            _draw_held_out(axes, curve, color)
        else:
            smoothed = moving_mean(np.array(curve.values), _SMOOTHING_STEPS)
            axes.plot(curve.steps, curve.values, color=color, alpha=0.25, linewidth=1)
            axes.plot(curve.steps, smoothed, color=color, linewidth=1.8, label=curve.label)
    if len(curves) > 1:
        axes.legend(fontsize=8, frameon=False)
    # A trainer that agrees with the sampler to the bit has gaps of 0, which a log axis cannot show.
    if panel.log and all(min(curve.values) > 0 for curve in curves):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_held_out(axes: Axes, curve: _Curve, color: str) -> None:
    values = curve.values
    axes.plot(curve.steps, values, color=color, marker="o", markersize=5, linewidth=1.4)
    # Text beside the first marker goes to the right of it and text at the last to the left, so that
    # both stay within the axes. A single marker is the last one: one key, one text.
    for index, side in {0: "left", len(values) - 1: "right"}.items():
        axes.annotate(
            f"{values[index]:.1%}",
            (curve.steps[index], values[index]),
            xytext=(0, 8),
            textcoords="offset points",
            ha=side,
            fontsize=9,
        )
    axes.set_ylim(0, max(1.0, *values) * 1.08)  # room for the texts above the markers
