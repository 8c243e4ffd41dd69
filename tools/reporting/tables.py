"""The tables of a comparison, before they become Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev

from megatron_rl.reporting.metrics_file import series
from megatron_rl.reporting.scores import NOTHING, caption, digits_of, number, seed_columns
from megatron_rl.run.files import CONFIG, CURVES, METRICS, SAMPLES
from tools.reporting.runs import ABSENT, Run
from tools.reporting.variants import (
    Variant,
    all_runs,
    distinct,
    setting_keys,
    shown,
    varying_keys,
)

COLLAPSED_BELOW = 0.5  # of its best: the paper that counts collapses prints no bound
_OTHER_VERSIONS = ("world_size", "model_fingerprint", "data_fingerprint")

Entry = str | tuple[Path, ...]  # paths: files of a run


@dataclass(frozen=True)
class Table:
    """Rows with the same columns; the first names the row. ``caption`` says how to read them."""

    rows: Sequence[Mapping[str, Entry]]
    caption: str = ""


def score(variant: Variant, metric: str) -> tuple[dict[int, float], list[int]]:
    """The last values of the counted runs: of each seed the mean over its runs, and the steps at
    which they were taken. Empty where no run has a finite one."""
    by_seed: dict[int, list[float]] = {}
    steps = set()
    for run in variant.counted:
        if (last := run.last_value(metric)) is not None:
            steps.add(last[0])
            by_seed.setdefault(run.seed, []).append(last[1])
    return {seed: fmean(found) for seed, found in sorted(by_seed.items())}, sorted(steps)


def method_table(variants: Sequence[Variant], metric: str) -> Table:
    """One row a variant; the first variant is the baseline."""
    scores = [score(variant, metric) for variant in variants]
    columns = seed_columns([values for values, _ in scores])
    rows = []
    for variant, (_, steps), own in zip(variants, scores, columns, strict=True):
        at_step = ", ".join(map(str, steps)) or NOTHING
        rows.append({"method": variant.label, "seeds": _seeds(variant), "at step": at_step, **own})
    return Table(rows, caption(metric))


@dataclass(frozen=True)
class Course:
    """A held-out metric of one run over its training, step 0 left out."""

    peak: float  # largest value
    # Coefficient of variation, "standard deviation divided by mean" (View-R1, arXiv 2506.21655,
    # section 3.2), with the population's deviation; None of a mean of 0.
    variation: float | None
    # The last value is below ``COLLAPSED_BELOW`` of the peak (A-GRAE, arXiv 2602.05548, D.5, counts
    # such runs: "in three out of the ten trials").
    is_collapsed: bool


def course(run: Run, metric: str) -> Course | None:
    """None where the run has fewer than two finite values after step 0."""
    _, values = series([row for row in run.rows_of(metric) if row["step"]], metric)
    if len(values) < 2:
        return None
    mean = fmean(values)
    variation = pstdev(values) / mean if mean else None
    return Course(max(values), variation, values[-1] < COLLAPSED_BELOW * max(values))


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


def _seeds(variant: Variant) -> str:
    """The number of seeds that count, and a remark on the others."""
    seeds = len({run.seed for run in variant.counted})
    if not variant.has_finished:
        return f"{seeds}, none finished"
    left = len(variant.runs) - len(variant.counted)
    return f"{seeds} ({left} unfinished not counted)" if left else str(seeds)


def cost(variant: Variant) -> dict[str, float | None]:
    """The mean cost of the counted runs of a variant, by the name of its column; None: no run says.

    Training are the steps alone, without start, evaluation and checkpoints.
    """
    runs = variant.counted
    step_seconds = [series(run.rows, "time/step_s")[1] for run in runs]
    evaluations = [series(run.rows, "time/evaluation_s")[1] for run in runs]
    return {
        "steps": fmean(sum(bool(row["step"]) for row in run.rows) for run in runs),
        "response tokens": _mean(sum, [_tokens(run, sampled=False) for run in runs]),
        "sampled tokens": _mean(sum, [_tokens(run, sampled=True) for run in runs]),
        "training [s]": _mean(sum, step_seconds),
        "evaluation [s]": _mean(sum, evaluations),
        "median step [s]": _mean(median, step_seconds),
    }


def _mean(of_run: Callable[[list[float]], float], runs: Sequence[list[float]]) -> float | None:
    """``of_run`` of the values of each run, averaged over those that have any: what a run does not
    say is not 0."""
    present = [of_run(values) for values in runs if values]
    return fmean(present) if present else None


def _tokens(run: Run, *, sampled: bool) -> list[float]:
    """Response tokens of each step; ``sampled``: with those of responses that were not trained."""
    of_steps = []
    for row in run.rows:
        mean = row.get("rollout/response_tokens_mean")
        count = row.get("rollout/num_responses")
        discarded = row.get("throughput/discarded_tokens_share") or 0.0
        if mean is not None and count is not None:
            # The share is one of all sampled tokens: 300 that were trained and 0.25 are 400.
            left = 1 - discarded if sampled and discarded < 1 else 1.0
            of_steps.append(mean * count / left)
    return of_steps


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
            last = run.last_value(metric)
            row: dict[str, Entry] = {
                "run": run.name,
                "method": variant.label,
                "seed": str(run.seed),
                "steps": f"{run.steps_done} / {run.steps_wanted}",
                "state": "finished" if run.finished else "unfinished",
                f"last {metric}": number(last[1], digits_of([last[1]])) if last else NOTHING,
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
