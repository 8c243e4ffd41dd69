"""A run in a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.runtime.metrics_file import read_metrics, series

# Metric key -> (name, format).
ROWS = {
    "eval/accuracy": ("held-out accuracy", "{:.1%}"),
    "reward/mean": ("training reward", "{:.3f}"),
    "rollout/response_tokens_mean": ("response length [tokens]", "{:.1f}"),
    "rollout/truncated_share": ("truncated", "{:.1%}"),
    "rollout/entropy": ("entropy [nats]", "{:.3f}"),
    "optim/grad_norm": ("gradient norm", "{:.3f}"),
    "mismatch/logprob_abs_diff_max": ("largest logprob gap [nats]", "{:.1e}"),
    "throughput/response_tokens_per_s": ("response tokens/s", "{:.0f}"),
    "time/step_s": ("step [s]", "{:.2f}"),
}


def report(metrics_jsonl: Path) -> str:
    """First, last and best-known facts of a run: one line a metric with its first value, its last and their difference.

    Raises:
        ValueError: no metrics file, or nothing in it to report.
    """
    rows = read_metrics(metrics_jsonl)
    lines = []
    for key, (name, form) in ROWS.items():
        steps, values = series(rows, key)
        if steps:
            sign = "+" if values[-1] >= values[0] else "-"
            change = sign + form.format(abs(values[-1] - values[0]))
            lines.append((name, f"{form.format(values[0])} @ {steps[0]}", f"{form.format(values[-1])} @ {steps[-1]}", change))
    if not lines:
        raise ValueError(f"{metrics_jsonl}: has none of the metrics of the report; let the run finish a step")
    return table([("metric", "first @ step", "last @ step", "change"), *lines])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as aligned columns, the first left, the others right, a rule under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        text.append("  ".join([first, *others]))
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
