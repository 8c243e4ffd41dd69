"""The tables of a comparison, before they become Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from pathlib import Path
from statistics import fmean

from megatron_rl.reporting.comparison.runs import ABSENT, CONFIG, CURVES, METRICS, SAMPLES, Run
from megatron_rl.reporting.comparison.scores import (
    COLLAPSED_BELOW,
    VariantScore,
    compare,
    cost,
    course,
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
from megatron_rl.reporting.intervals import Interval
from megatron_rl.reporting.metrics import metric as metric_of

NOTHING = "-"
_OTHER_VERSIONS = ("world_size", "model_fingerprint", "data_fingerprint")

Entry = str | tuple[Path, ...]  # paths: files of a run


@dataclass(frozen=True)
class Table:
    """Rows with the same columns; the first names the row. ``caption`` says how to read them."""

    rows: Sequence[Mapping[str, Entry]]
    caption: str = ""


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


_OWN = ("at step", "mean", "smallest to largest", "95 % of the mean")
_CONTRAST = ("difference", "pairs", "95 % of the difference", "than baseline")


def method_table(variants: Sequence[Variant], metric: str) -> Table:
    """One row a variant; the first variant is the baseline."""
    scores = [score(variant, metric) for variant in variants]
    baseline = scores[0]
    digits = digits_of([own.mean for own in scores if own is not None])
    rows = []
    for variant, own in zip(variants, scores, strict=True):
        row = {"method": variant.label, "seeds": _seeds(variant)}
        row |= dict.fromkeys((*_OWN, *_CONTRAST), NOTHING)
        if own is not None:
            row |= zip(_OWN, _reached(own, digits), strict=True)
        if variant is variants[0]:
            row["difference"] = "baseline"
        elif own is not None and baseline is not None:
            row |= zip(_CONTRAST, _contrast(own, baseline, digits + 1), strict=True)
        rows.append(row)
    entry = metric_of(metric)
    meaning = f"{metric}: {entry.meaning}" if entry else metric
    return Table(rows, f"{meaning} [{entry.unit}]" if entry and entry.unit else meaning)


def course_table(variants: Sequence[Variant], metric: str) -> Table | None:
    """How a held-out metric went over the training, one row a variant; None where no run was
    evaluated twice after step 0."""
    rows = []
    for variant in variants:
        found = [each for run in variant.counted if (each := course(run, metric)) is not None]
        variations = [each.variation for each in found if each.variation is not None]
        if not found:
            continue
        peak = fmean(each.peak for each in found)
        row = {"method": variant.label, "peak": number(peak, digits_of([peak]))}
        row["CV"] = f"{100 * fmean(variations):.2f} %" if variations else NOTHING
        row["collapsed"] = f"{sum(each.is_collapsed for each in found)} of {len(found)}"
        rows.append(row)
    caption = (
        f"{metric} over the evaluations after step 0. Peak and CV (standard deviation / mean) of a"
        " run, averaged over runs. Collapsed: runs whose last value is below"
        f" {COLLAPSED_BELOW:g} of their peak."
    )
    return Table(rows, caption) if rows else None


def _reached(own: VariantScore, digits: int) -> tuple[str, ...]:
    values = own.values.values()
    return (
        ", ".join(map(str, own.steps)),
        number(own.mean, digits),
        f"{number(min(values), digits)} to {number(max(values), digits)}",
        interval_text(own.interval, digits),
    )


def _contrast(own: VariantScore, baseline: VariantScore, digits: int) -> tuple[str, ...]:
    """``digits``: one more than those of the means, since differences are small."""
    found = compare(own, baseline)
    mean = number(found.interval.mean, digits, signed=True)
    between = interval_text(found.interval, digits, signed=True)
    return (mean, str(found.num_pairs or "unpaired"), between, found.word)


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
    baseline_seconds = costs[0]["training [s]"]
    rows = []
    for variant, own in zip(variants, costs, strict=True):
        row = {"method": variant.label, "steps": f"{own.pop('steps'):g}"}
        seconds = own["training [s]"]
        for name, value in own.items():
            row[name] = number(value, 2 if "[s]" in name and (value or 0) < 100 else 0)
        ratio = seconds / baseline_seconds if seconds is not None and baseline_seconds else None
        processes = {str(run.record.get("world_size") or 0) for run in variant.counted}
        row |= {
            "training time / baseline": number(ratio, 2),
            "processes": ", ".join(sorted(processes)),
        }
        rows.append(row)
    return Table(
        rows,
        "Means over the counted runs. Response tokens: of the responses that were trained; sampled "
        "tokens: with those that were thrown away. Training: all steps, without start, evaluation "
        "and checkpoints.",
    )


def runs_table(variants: Sequence[Variant], metric: str, with_files: bool) -> Table:
    """Every run with its state and, with ``with_files``, its files."""
    rows = []
    for variant in variants:
        for run in variant.runs:
            last = score(Variant(variant.label, (run,)), metric)
            row: dict[str, Entry] = {
                "run": run.name,
                "method": variant.label,
                "seed": str(run.seed),
                "steps": f"{run.steps_done} / {run.steps_wanted}",
                "state": "finished" if run.finished else "unfinished",
                f"last {metric}": number(last.mean, digits_of([last.mean])) if last else NOTHING,
            }
            if with_files:
                paths = [run.folder / name for name in (METRICS, SAMPLES, CONFIG, CURVES)]
                row["files"] = tuple(path for path in paths if path.is_file())
            rows.append(row)
    return Table(rows)


def settings_table(variants: Sequence[Variant]) -> Table:
    """Settings that are not the same in all runs, one column a variant."""
    seeds = {each.label: ", ".join(str(run.seed) for run in each.runs) for each in variants}
    rows = [{"setting": "seed", **seeds}]
    keys = varying_keys(all_runs(variants))
    # Grouped by section, in the order of the first key of each.
    sections = [key.rpartition(".")[0] for key in keys]
    for key in sorted(keys, key=lambda key: sections.index(key.rpartition(".")[0])):
        row = {"setting": key}
        for variant in variants:
            values = [NOTHING if value == ABSENT else shown(value) for value in variant.values(key)]
            row[variant.label] = " | ".join(values)
        rows.append(row)
    return Table(
        rows,
        "Settings that are equal in all runs are left out, and so are those of folders, logging and"
        " checkpoints. A dash: there is no such setting in this variant.",
    )


def versions_table(variants: Sequence[Variant]) -> Table:
    """Commit, libraries, plug-ins, model and data as the runs recorded them."""
    runs = all_runs(variants)
    rows = []
    for key in _version_keys(runs):
        values = [run.settings.get(key) for run in runs]
        different = distinct(values)
        if different == [None]:
            continue
        texts = []
        for value in different:
            text = "not recorded" if value is None else shown(value)
            if len(different) > 1:
                text += f" ({values.count(value)} of {len(runs)} runs)"
            texts.append(text)
        rows.append({"of": key.removeprefix("versions."), "as recorded": ", ".join(texts)})
    return Table(
        rows,
        "As the runs recorded them. They do not record whether the tree was clean, nor the"
        " hardware but for the number of processes.",
    )


def differing_versions(variants: Sequence[Variant]) -> list[str]:
    """Commit and libraries that are not the same in all runs."""
    runs = all_runs(variants)
    keys = [key for key in _version_keys(runs) if key.startswith(("git_commit", "versions."))]
    return [key for key in keys if len(distinct([run.settings.get(key) for run in runs])) > 1]


def _version_keys(runs: Sequence[Run]) -> list[str]:
    found = [
        key
        for key in setting_keys(runs)
        if key.startswith(("versions.", "plugins.")) or key in _OTHER_VERSIONS
    ]
    return ["git_commit", *found]
