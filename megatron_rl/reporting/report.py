"""A run as a table of text."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from megatron_rl.reporting.metrics_file import Row, read_metrics, series

# Metric key -> (name, format): what is told of a run in few words.
HEADLINES = {
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
    """First and last value of each headline metric, and their difference.

    A value that was not finite is called so.

    Raises:
        ValueError: no metrics file, or nothing in it to report.
    """
    rows = read_metrics(metrics_jsonl)
    lines = []
    for key, (name, form) in HEADLINES.items():
        present = [row for row in rows if key in row]
        if not present:
            continue
        ends = [present[0], present[-1]]
        at_ends = [f"{_value(row[key], form)} @ {row['step']}" for row in ends]
        lines.append((name, *at_ends, _change(ends[0][key], ends[1][key], form)))
    if not lines:
        raise ValueError(
            f"{metrics_jsonl}: has none of the metrics of the report; let the run finish a step"
        )
    lines += _excluded(rows)
    lines += _skipped(rows)
    return table([("metric", "first @ step", "last @ step", "change"), *lines])


def _value(value: float | None, form: str) -> str:
    return "not finite" if value is None else form.format(value)


def _change(first: float | None, last: float | None, form: str) -> str:
    if first is None or last is None:
        return ""
    sign = "+" if last >= first else "-"
    return sign + form.format(abs(last - first))


def _excluded(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """A line with the mean share of responses without a verdict, and the step with most of them."""
    steps, shares = series(rows, "reward/excluded_share")
    if not steps:
        return []
    most = max(shares)
    highest = f"most {most:.1%} @ {steps[shares.index(most)]}" if most else ""
    return [("responses without a verdict", "", f"mean {fmean(shares):.1%}", highest)]


def _skipped(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """A line with the number of optimizer steps that were skipped in the whole run."""
    steps, counts = series(rows, "optim/skipped")
    skipped = [step for step, count in zip(steps, counts, strict=True) if count]
    if not skipped:
        return [("skipped optimizer steps", "", "0", "")] if steps else []
    last = f"{sum(counts):g}, last @ {skipped[-1]}"
    return [("skipped optimizer steps", f"first @ {skipped[0]}", last, "")]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as columns, the first aligned left, with a rule under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
