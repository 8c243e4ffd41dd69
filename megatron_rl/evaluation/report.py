"""A run in a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.runtime.metrics_file import Row, read_metrics

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
    """First, last and best-known facts of a run: one line a metric with its first value, its last and their difference. A value that
    was not finite is said so.

    Raises:
        ValueError: no metrics file, or nothing in it to report.
    """
    rows = read_metrics(metrics_jsonl)
    lines = []
    for key, (name, form) in ROWS.items():
        present = [row for row in rows if key in row]
        if present:
            first, last = present[0], present[-1]
            shown = (f"{_value(row[key], form)} @ {row['step']}" for row in (first, last))
            lines.append((name, *shown, _change(first[key], last[key], form)))
    if not lines:
        raise ValueError(f"{metrics_jsonl}: has none of the metrics of the report; let the run finish a step")
    lines += _skipped(rows)
    return table([("metric", "first @ step", "last @ step", "change"), *lines])


def _value(value: float | None, form: str) -> str:
    return "not finite" if value is None else form.format(value)


def _change(first: float | None, last: float | None, form: str) -> str:
    if first is None or last is None:
        return ""
    return ("+" if last >= first else "-") + form.format(abs(last - first))


def _skipped(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """The optimizer steps that were left out, all in all: their mean would say nothing."""
    present = [row for row in rows if "optim/skipped" in row]
    with_skips = [row for row in present if row["optim/skipped"]]
    if not present:
        return []
    if not with_skips:
        return [("skipped optimizer steps", "", "0", "")]
    total = sum(int(row["optim/skipped"] or 0) for row in with_skips)
    return [("skipped optimizer steps", f"first @ {with_skips[0]['step']}", f"{total}, last @ {with_skips[-1]['step']}", "")]


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
