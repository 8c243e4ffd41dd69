"""The curves of a run as one figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.runtime.metrics_file import Row, read_metrics, series

SMOOTHING_STEPS = 10
COLORS = ("#1f5fa8", "#c4501b", "#3b8a4e")


@dataclass(frozen=True)
class Panel:
    """One set of axes: the label of its y axis, and (metric key, label) of each curve."""

    y_label: str
    curves: tuple[tuple[str, str], ...]
    log: bool = False


PANELS = (
    Panel("held-out accuracy", (("eval/accuracy", "accuracy"),)),
    Panel("training reward", (("reward/mean", "mean reward"), ("reward/accuracy", "accuracy"))),
    Panel("response length [tokens]", (("rollout/response_tokens_mean", "mean"), ("rollout/response_tokens_max", "longest"))),
    Panel("entropy [nats]", (("rollout/entropy", "entropy"),)),
    Panel(
        "trainer against sampler [nats]",
        (("mismatch/logprob_abs_diff_max", "largest |logprob gap|"), ("mismatch/logprob_abs_diff_mean", "mean |logprob gap|")),
        log=True,
    ),
    Panel("KL to the reference [nats]", (("kl/reference_mean", "KL"),)),
    Panel("gradient norm", (("optim/grad_norm", "before clipping"),)),
    Panel("throughput [response tokens/s]", (("throughput/response_tokens_per_s", "tokens/s"),)),
)


def draw_curves(metrics_jsonl: Path, out: Path, title: str | None = None) -> Path:
    """Draw every panel of which the run has a metric to ``out`` (PNG by its suffix) and return ``out``.

    Training curves: each step faint, its moving mean over ``SMOOTHING_STEPS`` steps strong. Held-out values: markers, joined, first and
    last written out. ``title``: the name of the run's folder by default.

    Raises:
        ValueError: no metrics file, or nothing in it to draw.
    """
    rows = read_metrics(metrics_jsonl)
    panels = [panel for panel in PANELS if any(series(rows, key)[0] for key, _ in panel.curves)]
    if not panels:
        raise ValueError(f"{metrics_jsonl}: has none of the metrics of the figure; let the run finish a step")
    num_columns = min(4, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(4.2 * num_columns, 3.1 * num_rows + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no state of pyplot
    figure.suptitle(title if title is not None else metrics_jsonl.resolve().parent.name, fontsize=13, fontweight="bold")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def smooth(values: list[float], width: int) -> list[float]:
    """Mean over up to ``width // 2`` neighbours on either side, fewer at the ends."""
    half = width // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _draw_panel(axes: Axes, panel: Panel, rows: list[Row]) -> None:
    present = [(key, label, *series(rows, key)) for key, label in panel.curves]
    present = [curve for curve in present if curve[2]]
    # One line for two equal metrics, such as the reward where it is the accuracy.
    present = [curve for at, curve in enumerate(present) if curve[3] not in [earlier[3] for earlier in present[:at]]]
    for color, (key, label, steps, values) in zip(COLORS, present, strict=False):
        if key.startswith("eval/"):
            _draw_held_out(axes, steps, values, color)
        else:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values, SMOOTHING_STEPS), color=color, linewidth=1.8, label=label)
    if len(present) > 1:
        axes.legend(fontsize=8, frameon=False)
    if panel.log and all(value > 0 for *_, values in present for value in values):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_held_out(axes: Axes, steps: list[int], values: list[float], color: str) -> None:
    axes.plot(steps, values, color=color, marker="o", markersize=5, linewidth=1.4)
    for index, side in {0: "left", len(values) - 1: "right"}.items():
        place = (steps[index], values[index])
        axes.annotate(f"{values[index]:.1%}", place, xytext=(0, 8), textcoords="offset points", ha=side, fontsize=9)
    axes.set_ylim(0, max(1.0, *values) * 1.08)
