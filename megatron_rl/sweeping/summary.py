"""The table at the end of a sweep: that of a report, for the console."""

from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.reporting.metrics_file import Row
from megatron_rl.reporting.report import table
from megatron_rl.reporting.scores import caption, last_value, rows_of, seed_columns
from megatron_rl.run.files import METRICS, metrics_of
from megatron_rl.sweeping.trials import Trial

Runs = dict[int, tuple[list[Row], list[Row]]]  # by seed, of ``metrics_of``
_LEFT_OUT = "95 % of the mean"  # of the columns of a report: a line is long enough


def summary(trials: Sequence[Trial], finished: Iterable[str], metrics: Sequence[str]) -> str:
    """A table for each metric, then what is not in it.

    A row is a combination without its seed, compared with the first one at equal seed.

    Args:
        finished: the names of the trials that are; a mean with runs of other lengths says nothing.
    """
    done = set(finished)
    by_name = {trial.name: trial for trial in trials}
    # By label and seed. A trial that was not run itself still counts in its row, by the run that
    # was made for it: with method=grpo,dapo clip=0.2,0.3 a combination may equal the default of
    # another. A combination whose runs are all those of another one has no row of its own.
    runs: dict[str, Runs] = {each.label: {} for each in trials if not each.same_as}
    problems: list[str] = []
    for trial in trials:
        made = by_name[trial.same_as or trial.name]
        if trial.label in runs and made.name in done and (made.folder / METRICS).is_file():
            runs[trial.label][made.config.seed] = metrics_of(made.folder, made.name, problems)
    parts = [_table(runs, metric) for metric in metrics]
    missing = [trial.name for trial in trials if not trial.same_as and trial.name not in done]
    notes = list(dict.fromkeys(problems))  # a run may count in two rows
    if missing:
        notes.append(f"not in the table, because not finished: {', '.join(missing)}")
    notes += [f"{trial.name}: the same run as {trial.same_as}" for trial in trials if trial.same_as]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _table(runs: Mapping[str, Runs], metric: str) -> str:
    rows = []
    last = [_last(by_seed, metric) for by_seed in runs.values()]
    for (label, by_seed), columns in zip(runs.items(), seed_columns(last), strict=True):
        del columns[_LEFT_OUT]
        seeds = str(len(by_seed) or "0, none finished")
        rows.append({"method": label, "seeds": seeds, **columns})
    return f"{caption(metric)}\n{table([list(rows[0]), *(list(row.values()) for row in rows)])}"


def _last(by_seed: Runs, metric: str) -> dict[int, float]:
    """The last value of each seed that has one."""
    found = {seed: last_value(rows_of(metric, *rows), metric) for seed, rows in by_seed.items()}
    return {seed: last[1] for seed, last in found.items() if last is not None}
