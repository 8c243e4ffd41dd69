"""The table at the end of a sweep: a mean over seeds, and differences of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from megatron_rl.reporting.intervals import Interval, bootstrap, student
from megatron_rl.reporting.metrics_file import read_metrics, series
from megatron_rl.reporting.report import table
from megatron_rl.run.start import METRICS
from megatron_rl.sweeping.trials import Trial

Scores = Mapping[str, Mapping[int, float]]  # combination without its seed -> seed -> value


def summary(trials: Sequence[Trial], finished: Iterable[str], metrics: Sequence[str]) -> str:
    """A table for each metric, then what is not in it.

    A row is a combination without its seed: the number of finished runs, mean and population
    standard deviation of the last value, and, from two seeds on that both have, the mean difference
    to the first combination at equal seed with 95 % intervals.

    Args:
        finished: the names of the trials that are; a mean with runs of other lengths says nothing.
    """
    done = set(finished)
    parts = [_table(_last_values(trials, done, metric), metric) for metric in metrics]
    missing = [trial.name for trial in trials if not trial.same_as and trial.name not in done]
    notes = []
    if missing:
        notes.append(f"not in the table, because not finished: {', '.join(missing)}")
    notes += [f"{trial.name}: the same run as {trial.same_as}" for trial in trials if trial.same_as]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _last_values(trials: Sequence[Trial], finished: set[str], metric: str) -> Scores:
    """The last value of every finished run that has the metric.

    A combination whose runs are all those of another one has no row of its own.
    """
    by_name = {trial.name: trial for trial in trials}
    rows = {trial.label for trial in trials if not trial.same_as}
    # A trial that was not run itself still counts in its row, by the values of the run for it: with
    # method=grpo,dapo clip=0.2,0.3 a combination may equal the default of another.
    scores: dict[str, dict[int, float]] = {}
    for trial in trials:
        if trial.label not in rows:
            continue
        of_label = scores.setdefault(trial.label, {})
        run = by_name[trial.same_as or trial.name]
        file = run.folder / METRICS
        if run.name in finished and file.is_file():
            _, values = series(read_metrics(file), metric)
            if values:
                of_label[trial.config.seed] = values[-1]
    return scores


def _table(scores: Scores, metric: str) -> str:
    first = next(iter(scores))
    largest = [max(map(abs, of_label.values())) for of_label in scores.values() if of_label]
    form = "{:.3f}" if max(largest, default=1.0) >= 0.01 else "{:.2e}"
    rows = []
    pairs = {label: differences(of_label, scores[first]) for label, of_label in scores.items()}
    has_pairs = any(len(pairs[label]) > 1 for label in scores if label != first)
    for label, of_label in scores.items():
        row = [label, str(len(of_label)), _spread(list(of_label.values()), form)]
        if has_pairs:
            row += _difference([] if label == first else pairs[label], form)
        rows.append(row)
    head = ["combination", "runs", f"last {metric}"]
    if has_pairs:
        head += ["pairs", f"minus {first}", "Student 95 %", "bootstrap 95 %"]
    return table([head, *rows])


def differences(of_label: Mapping[int, float], of_first: Mapping[int, float]) -> list[float]:
    """Paired differences over the seeds that both have."""
    return [value - of_first[seed] for seed, value in of_label.items() if seed in of_first]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{form.format(fmean(values))} +- {form.format(pstdev(values))}"


def _difference(values: Sequence[float], form: str) -> list[str]:
    if not values:
        return ["", "", "", ""]
    signed = form.replace(":", ":+")  # "{:.3f}" -> "{:+.3f}": with its sign always
    intervals = ["", ""]
    if len(values) > 1:
        intervals = [_bounds(student(values), signed), _bounds(bootstrap(values), signed)]
    return [str(len(values)), signed.format(fmean(values)), *intervals]


def _bounds(interval: Interval, form: str) -> str:
    return f"{form.format(interval.low)} to {form.format(interval.high)}"
