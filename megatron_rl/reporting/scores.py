"""Last values of runs, and means over seeds compared with those of a baseline."""

from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10
from statistics import fmean

from megatron_rl.reporting.intervals import Interval, student, welch
from megatron_rl.reporting.metrics import metric as metric_of
from megatron_rl.reporting.metrics_file import PASS_AT, Row, is_held_out, series

BySeed = Mapping[int, float]
NOTHING = "-"
LAST_ROWS = 10  # a metric of training is the mean of its last values: one step is noise
_OWN = ("mean", "smallest to largest", "95 % of the mean")
_CONTRAST = ("difference", "pairs", "95 % of the difference", "than baseline")


def rows_of(metric: str, rows: list[Row], evaluation: list[Row]) -> list[Row]:
    """The rows to take a metric from: those of the evaluation after the training for pass@k,
    since it asks more often, and for what the training has not; else those of the training."""
    later_has_it = any(metric in row for row in evaluation)
    if later_has_it and (metric.startswith(PASS_AT) or not any(metric in row for row in rows)):
        return evaluation
    return rows


def last_value(rows: Sequence[Row], metric: str) -> tuple[int, float] | None:
    """(step, value) of the last evaluation; of a metric of training the mean of its last values.

    None where no row has it, or the last one was not finite.
    """
    rows = [row for row in rows if metric in row]
    if not rows:
        return None
    step = int(rows[-1]["step"] or 0)
    if is_held_out(metric):
        value = rows[-1][metric]
        return None if value is None else (step, float(value))
    _, values = series(rows[-LAST_ROWS:], metric)
    return (step, fmean(values)) if values else None


def compare(values: BySeed, baseline: BySeed) -> tuple[int, Interval, str]:
    """Mean by seed minus that of the baseline: paired over common seeds; without any, Welch's
    interval of the difference of means.

    Returns:
        The number of pairs, the 95 % interval, and ``higher``, ``lower`` or ``not shown``.
    """
    common = sorted(values.keys() & baseline.keys())
    if common:
        found = student([values[seed] - baseline[seed] for seed in common])
    else:
        found = welch(list(values.values()), list(baseline.values()))
    word = "higher" if found.mean > 0 else "lower"
    if not isfinite(found.low):
        word = "not shown (one seed)"
    # Equal differences make an interval of no width, which leaves out 0 however small they are.
    elif found.low == found.high:
        word = "not shown (no spread)"
    elif found.low <= 0 <= found.high:
        word = "not shown"
    return len(common), found, word


def seed_columns(variants: Sequence[BySeed]) -> list[dict[str, str]]:
    """The columns of each variant; the first one is the baseline."""
    baseline = variants[0]
    digits = digits_of([fmean(values.values()) for values in variants if values])
    rows = [dict.fromkeys((*_OWN, *_CONTRAST), NOTHING) for _ in variants]
    for row, values in zip(rows, variants, strict=True):
        if values:
            own = list(values.values())
            ends = f"{number(min(own), digits)} to {number(max(own), digits)}"
            between = interval_text(student(own), digits)
            row |= zip(_OWN, (number(fmean(own), digits), ends, between), strict=True)
        if values and baseline and row is not rows[0]:
            pairs, interval, word = compare(values, baseline)
            # A digit more than the means have, since differences are small.
            mean = number(interval.mean, digits + 1, signed=True)
            between = interval_text(interval, digits + 1, signed=True)
            row |= zip(_CONTRAST, (mean, str(pairs or "unpaired"), between, word), strict=True)
    rows[0]["difference"] = "baseline"
    return rows


def caption(metric: str) -> str:
    entry = metric_of(metric)
    meaning = f"{metric}: {entry.meaning}" if entry else metric
    return f"{meaning} [{entry.unit}]" if entry and entry.unit else meaning


def number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """A number with so many digits after the point: ``0.534``, ``+12.300``, ``1,234.000``."""
    sign = "+" if signed else ""
    return NOTHING if value is None else f"{value:{sign},.{digits}f}"


def digits_of(values: Sequence[float]) -> int:
    """Digits after the point for a column of such values: three or more that count."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 1000:
        return 0
    if largest >= 10:
        return 1
    if largest >= 0.01 or largest == 0:
        return 3
    # 0.005 -> floor(log10) = -3 -> 5 digits: 0.00500.
    return min(12, 2 - floor(log10(largest)))


def interval_text(interval: Interval, digits: int, signed: bool = False) -> str:
    """``low to high``; of a single value there is none."""
    if not isfinite(interval.low):
        return NOTHING
    return f"{number(interval.low, digits, signed)} to {number(interval.high, digits, signed)}"
