"""Scores and costs of variants, and differences to the baseline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median, pstdev

from megatron_rl.reporting.comparison.runs import Run
from megatron_rl.reporting.comparison.variants import Variant
from megatron_rl.reporting.intervals import Interval, student, welch
from megatron_rl.reporting.metrics_file import is_held_out, series

COLLAPSED_BELOW = 0.5  # of its best: the paper that counts collapses prints no bound
LAST_ROWS = 10  # a metric of training is the mean of its last values: one step is noise


@dataclass(frozen=True)
class VariantScore:
    """A metric of the counted runs of a variant."""

    values: Mapping[int, float]  # of each seed, the mean over its runs
    steps: tuple[int, ...]  # at which they were taken

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    @property
    def interval(self) -> Interval:
        """Student's interval of the mean over seeds."""
        return student(list(self.values.values()))


@dataclass(frozen=True)
class Comparison:
    """Mean of a variant minus that of the baseline, with its 95 % interval."""

    num_pairs: int  # common seeds; 0 where there are none, and the means are compared unpaired
    interval: Interval

    @property
    def word(self) -> str:
        """``higher``, ``lower`` or ``not shown``."""
        if not isfinite(self.interval.low):
            return "not shown (one seed)"
        # Equal differences make an interval of no width, which leaves out 0 however small they are.
        if self.interval.low == self.interval.high:
            return "not shown (no spread)"
        if not self.interval.excludes(0.0):
            return "not shown"
        return "higher" if self.interval.mean > 0 else "lower"


def score(variant: Variant, metric: str) -> VariantScore | None:
    """None where no counted run has a finite value."""
    by_seed: dict[int, list[float]] = {}
    steps = set()
    for run in variant.counted:
        last = last_value(run, metric)
        if last is not None:
            steps.add(last[0])
            by_seed.setdefault(run.seed, []).append(last[1])
    if not by_seed:
        return None
    values = {seed: fmean(found) for seed, found in sorted(by_seed.items())}
    return VariantScore(values, tuple(sorted(steps)))


def last_value(run: Run, metric: str) -> tuple[int, float] | None:
    """(step, value) of the last evaluation; of a metric of training the mean of its last values.

    None where the run has none, or the last one was not finite.
    """
    rows = [row for row in run.rows_of(metric) if metric in row]
    if not rows:
        return None
    step = int(rows[-1]["step"] or 0)
    if is_held_out(metric):
        value = rows[-1][metric]
        return None if value is None else (step, float(value))
    _, values = series(rows[-LAST_ROWS:], metric)
    return (step, fmean(values)) if values else None


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


def compare(variant: VariantScore, baseline: VariantScore) -> Comparison:
    """Paired over common seeds; without any, Welch's interval of the difference of means."""
    common = sorted(variant.values.keys() & baseline.values.keys())
    if common:
        differences = [variant.values[seed] - baseline.values[seed] for seed in common]
        return Comparison(len(common), student(differences))
    means = (list(variant.values.values()), list(baseline.values.values()))
    return Comparison(0, welch(*means))


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
