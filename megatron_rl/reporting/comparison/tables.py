"""The tables of a comparison, as text that page and Markdown share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from megatron_rl.reporting.comparison.panels import some
from megatron_rl.reporting.comparison.runs import (
    ABSENT,
    CONFIG,
    CURVES,
    METRICS,
    SAMPLES,
    Run,
)
from megatron_rl.reporting.comparison.scores import (
    Comparison,
    Cost,
    VariantScore,
    compare,
    cost,
    score,
)
from megatron_rl.reporting.comparison.variants import (
    Variant,
    all_runs,
    distinct,
    setting_keys,
    shown,
    varying_keys,
)
from megatron_rl.reporting.evaluation import HIGH, LOW
from megatron_rl.reporting.intervals import Interval
from megatron_rl.reporting.metrics import metric as metric_of
from megatron_rl.reporting.metrics_file import Row
from megatron_rl.reporting.pass_at_k import PASS_AT, pass_at_ks

NOTHING = "-"
_NO_CONTRAST = (NOTHING,) * 5  # for what ``_contrast`` returns
_MAJORITY = re.compile(r"eval/maj_at_\d+")
_OTHER_VERSIONS = ("world_size", "model_fingerprint", "data_fingerprint")


@dataclass(frozen=True)
class Link:
    """A file of a run.

    Attributes:
        path: made relative to the report where it is written.
    """

    text: str
    path: str


Entry = str | tuple[Link, ...]


@dataclass(frozen=True)
class Table:
    """Rows of equal length; ``caption`` says how to read them. The first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    caption: str = ""


def number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """A number with so many digits behind the point.

    Example: ``0.534``, ``+12.300``, ``1,234.000``.
    """
    sign = "+" if signed else ""
    return NOTHING if value is None else f"{value:{sign},.{digits}f}"


def digits_of(values: Sequence[float]) -> int:
    """The number of digits behind the point for a column of such values: three or more that
    count."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 1000:
        return 0
    if largest >= 10:
        return 1
    if largest >= 0.01 or largest == 0:
        return 3
    # 0.005 -> floor(log10) = -3 -> 5 digits: 0.00500.
    return min(12, 2 - floor(log10(largest)))


def _interval_text(interval: Interval, digits: int, signed: bool = False) -> str:
    """``low to high``; of a single value there is none."""
    if not isfinite(interval.low):
        return NOTHING
    return f"{number(interval.low, digits, signed)} to {number(interval.high, digits, signed)}"


def _seconds_text(value: float | None) -> str:
    """Seconds, to a hundredth where they are few."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def method_table(variants: Sequence[Variant], metric: str) -> Table:
    """One row a variant; the first variant is the baseline."""
    scores = [score(variant, metric) for variant in variants]
    baseline = scores[0]
    digits = digits_of([own.mean for own in scores if own is not None])
    rows = []
    for variant, own in zip(variants, scores, strict=True):
        if variant is variants[0]:
            contrast = ("baseline", *_NO_CONTRAST[1:])
        elif own is None or baseline is None:
            contrast = _NO_CONTRAST
        else:
            contrast = _contrast(compare(own, baseline), digits)
        rows.append(
            (variant.label, _seeds(variant), *_reached(own, digits), *contrast, _best(own, digits))
        )
    columns = (
        "method",
        "seeds",
        "at step",
        "mean",
        "smallest to largest",
        "95 % of the mean",
        "difference",
        "pairs",
        "bootstrap 95 %",
        "Student 95 %",
        "than baseline",
        "best mean @ step",
    )
    entry = metric_of(metric)
    meaning = f"{metric}: {entry.meaning}" if entry else metric
    unit = f" [{entry.unit}]" if entry and entry.unit else ""
    return Table(columns, tuple(rows), f"{meaning}{unit}")


def _reached(own: VariantScore | None, digits: int) -> tuple[str, str, str, str]:
    """Step, mean, smallest to largest, and the interval of the mean."""
    if own is None:
        return (NOTHING, NOTHING, NOTHING, NOTHING)
    values = own.values.values()
    return (
        ", ".join(map(str, own.steps)),
        number(own.mean, digits),
        f"{number(min(values), digits)} to {number(max(values), digits)}",
        _interval_text(own.interval, digits),
    )


def _best(own: VariantScore | None, digits: int) -> str:
    if own is None or own.best is None:
        return NOTHING
    step, mean = own.best
    return f"{number(mean, digits)} @ {step}"


def _contrast(comparison: Comparison, digits: int) -> tuple[str, str, str, str, str]:
    """Columns "difference" to "than baseline". They have a digit more than the means, since
    differences are small."""
    digits += 1
    pairs = str(comparison.num_pairs) if comparison.num_pairs else "unpaired"
    return (
        number(comparison.student.mean, digits, signed=True),
        pairs,
        _interval_text(comparison.bootstrap, digits, signed=True),
        _interval_text(comparison.student, digits, signed=True),
        comparison.word,
    )


def _seeds(variant: Variant) -> str:
    """The number of seeds that count, and a remark on the others."""
    seeds = len({run.seed for run in variant.counted})
    if not variant.has_finished:
        return f"{seeds}, none finished"
    left = len(variant.runs) - len(variant.counted)
    return f"{seeds} ({left} unfinished not counted)" if left else str(seeds)


def cost_table(variants: Sequence[Variant]) -> Table:
    """The mean cost of a run, one row a variant."""
    costs = [cost(variant) for variant in variants]
    first = costs[0]
    rows = [
        (variant.label, *_cost_row(own, first))
        for variant, own in zip(variants, costs, strict=True)
    ]
    columns = (
        "method",
        "steps",
        "response tokens",
        "sampled tokens",
        "training [s]",
        "evaluation [s]",
        "median step [s]",
        "training time / baseline",
        "processes",
    )
    return Table(
        columns,
        tuple(rows),
        "Means over the counted runs. Response tokens: of the responses that were trained; sampled "
        "tokens: with those that were thrown away. Training: all steps, without start, evaluation "
        "and checkpoints.",
    )


def _cost_row(own: Cost, first: Cost) -> tuple[str, ...]:
    ratio = None
    if own.training_seconds is not None and first.training_seconds:
        ratio = own.training_seconds / first.training_seconds
    return (
        f"{own.steps:g}",
        _count(own.response_tokens),
        _count(own.sampled_tokens),
        _seconds_text(own.training_seconds),
        _seconds_text(own.evaluation_seconds),
        _seconds_text(own.seconds_per_step),
        number(ratio, 2),
        ", ".join(map(str, own.processes)),
    )


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def evaluation_table(variants: Sequence[Variant]) -> Table | None:
    """The last step of the evaluation after the training, with its own intervals; None
    where no run has one."""
    last = [run.evaluation[-1] for run in all_runs(variants) if run.evaluation]
    if not last:
        return None
    majorities: set[str] = set()
    for row in last:
        majorities.update(filter(_MAJORITY.fullmatch, row))
    passes = [f"{PASS_AT}{k}" for k in some(pass_at_ks(last))]
    keys = ["eval/accuracy", *sorted(majorities), *passes]
    rows = []
    for variant in variants:
        for run in variant.runs:
            if run.evaluation:
                row = run.evaluation[-1]
                values = [_with_bounds(row, key) for key in keys]
                rows.append((run.name, variant.label, str(run.seed), str(row["step"]), *values))
    return Table(
        ("run", "method", "seed", "step", *keys),
        tuple(rows),
        "By megatron_rl.evaluate. In brackets the 95 % interval over prompts: it says nothing about"
        " other seeds.",
    )


def _with_bounds(row: Row, key: str) -> str:
    """Example: ``0.500 [0.410, 0.590]``; without bounds where those of one prompt are infinite."""
    name = key.removeprefix("eval/")
    value = number(row.get(key))
    low = number(row.get(LOW + name))
    high = number(row.get(HIGH + name))
    if NOTHING in (value, low, high):
        return value
    return f"{value} [{low}, {high}]"


def runs_table(variants: Sequence[Variant], metric: str, with_links: bool) -> Table:
    """Every run with its state and, with links, its files."""
    rows = []
    for variant in variants:
        for run in variant.runs:
            state = "finished" if run.finished else "unfinished"
            last = score(Variant(variant.label, (run,)), metric)
            value = NOTHING
            if last is not None:
                value = number(last.mean, digits_of([last.mean]))
            steps = f"{run.steps_done} / {run.steps_wanted}"
            row = (run.name, variant.label, str(run.seed), steps, state, value)
            rows.append((*row, _files(run)) if with_links else row)
    columns = ("run", "method", "seed", "steps", "state", f"last {metric}")
    return Table((*columns, "files") if with_links else columns, tuple(rows))


def _files(run: Run) -> tuple[Link, ...]:
    names = (METRICS, SAMPLES, CONFIG, CURVES)
    present = [name for name in names if run.path(name).is_file()]
    return tuple(Link(name, str(run.path(name))) for name in present)


def settings_table(variants: Sequence[Variant]) -> Table:
    """Settings that are not the same in all runs, one column a variant."""
    runs = all_runs(variants)
    seeds = [", ".join(str(run.seed) for run in variant.runs) for variant in variants]
    rows: list[tuple[Entry, ...]] = [("seed", *seeds)]
    for key in _grouped(varying_keys(runs)):
        of_variants = [" | ".join(map(_setting, variant.values(key))) for variant in variants]
        rows.append((key, *of_variants))
    return Table(
        ("setting", *(variant.label for variant in variants)),
        tuple(rows),
        "Settings that are equal in all runs are left out, and so are those of folders, logging and"
        " checkpoints. A dash: there is no such setting in this variant.",
    )


def _grouped(keys: Sequence[str]) -> list[str]:
    """Keys grouped by section, in the order of the first of each."""
    sections = [key.rpartition(".")[0] for key in keys]
    return sorted(keys, key=lambda key: sections.index(key.rpartition(".")[0]))


def _setting(value: object) -> str:
    return NOTHING if value == ABSENT else shown(value)


def versions_table(variants: Sequence[Variant]) -> Table:
    """Commit, libraries, plug-ins, model and data as the runs recorded them."""
    runs = all_runs(variants)
    rows = []
    for key in _version_keys(runs):
        values = [run.settings.get(key) for run in runs]
        if distinct(values) == [None]:
            continue
        texts = []
        for value in distinct(values):
            text = "not recorded" if value is None else shown(value)
            if len(distinct(values)) > 1:
                text += f" ({values.count(value)} of {len(runs)} runs)"
            texts.append(text)
        rows.append((key.removeprefix("versions."), ", ".join(texts)))
    return Table(
        ("of", "as recorded"),
        tuple(rows),
        "As the runs recorded them. They do not record whether the tree was clean, nor the"
        " hardware but for the number of processes.",
    )


def differing_versions(variants: Sequence[Variant]) -> list[str]:
    """Commit and libraries that are not the same in all runs."""
    runs = all_runs(variants)
    differing = []
    for key in _version_keys(runs):
        values = [run.settings.get(key) for run in runs]
        if key.startswith(("git_commit", "versions.")) and len(distinct(values)) > 1:
            differing.append(key)
    return differing


def _version_keys(runs: Sequence[Run]) -> list[str]:
    found = []
    for key in setting_keys(runs):
        if key.startswith(("versions.", "plugins.")) or key in _OTHER_VERSIONS:
            found.append(key)
    return ["git_commit", *found]
