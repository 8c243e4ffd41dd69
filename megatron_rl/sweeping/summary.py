"""The table at the end of a sweep: a mean over seeds, and differences of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from megatron_rl.reporting.comparison.scores import VariantScore, compare
from megatron_rl.reporting.comparison.tables import digits_of, interval_text, number
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
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _last_values(trials: Sequence[Trial], finished: set[str], metric: str) -> Scores:
    """The last value of every finished run that has the metric.

    A combination whose runs are all those of another one has no row of its own.
    """
    by_name = {trial.name: trial for trial in trials}
    # A trial that was not run itself still counts in its row, by the values of the run for it: with
    # method=grpo,dapo clip=0.2,0.3 a combination may equal the default of another.
    scores: dict[str, dict[int, float]] = {trial.label: {} for trial in trials if not trial.same_as}
    for trial in trials:
        run = by_name[trial.same_as or trial.name]
        file = run.folder / METRICS
        if trial.label in scores and run.name in finished and file.is_file():
            _, values = series(read_metrics(file), metric)
            if values:
                scores[trial.label][trial.config.seed] = values[-1]
    return scores


def _table(scores: Scores, metric: str) -> str:
    first, *others = scores
    digits = digits_of([value for of_label in scores.values() for value in of_label.values()])
    rows = {label: [label, *_mean(list(scores[label].values()), digits)] for label in scores}
    head = ["combination", "runs", f"last {metric}"]
    if any(len(scores[label].keys() & scores[first].keys()) > 1 for label in others):
        head += ["pairs", f"minus {first}", "Student 95 %", "bootstrap 95 %"]
        for label, row in rows.items():
            row += ["", "", "", ""] if label == first else _pairs(scores, label, first, digits)
    return table([head, *rows.values()])


def _mean(values: Sequence[float], digits: int) -> list[str]:
    if not values:
        return ["0", "-"]
    spread = number(pstdev(values), digits)
    return [str(len(values)), f"{number(fmean(values), digits)} +- {spread}"]


def _pairs(scores: Scores, label: str, first: str, digits: int) -> list[str]:
    if not scores[label].keys() & scores[first].keys():
        return ["", "", "", ""]
    own, baseline = (VariantScore(scores[name], ()) for name in (label, first))
    found = compare(own, baseline)
    intervals = [interval_text(each, digits, True) for each in (found.student, found.bootstrap)]
    return [str(found.num_pairs), number(found.student.mean, digits, signed=True), *intervals]
