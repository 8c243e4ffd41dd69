"""The table at the end of a sweep: that of a report, for the console."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.reporting.metrics_file import read_metrics
from megatron_rl.reporting.report import table
from megatron_rl.reporting.scores import caption, last_value, rows_of, seed_columns
from megatron_rl.run.files import EVALUATION, METRICS
from megatron_rl.sweeping.trials import Trial

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
    folders: dict[str, dict[int, Path]] = {each.label: {} for each in trials if not each.same_as}
    for trial in trials:
        made = by_name[trial.same_as or trial.name]
        if trial.label in folders and made.name in done and (made.folder / METRICS).is_file():
            folders[trial.label][made.config.seed] = made.folder
    parts = [_table(folders, metric) for metric in metrics]
    missing = [trial.name for trial in trials if not trial.same_as and trial.name not in done]
    notes = []
    if missing:
        notes.append(f"not in the table, because not finished: {', '.join(missing)}")
    notes += [f"{trial.name}: the same run as {trial.same_as}" for trial in trials if trial.same_as]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _table(folders: dict[str, dict[int, Path]], metric: str) -> str:
    variants = [
        {seed: value for seed, run in by_seed.items() if (value := _last(run, metric)) is not None}
        for by_seed in folders.values()
    ]
    rows = []
    for (label, by_seed), columns in zip(folders.items(), seed_columns(variants), strict=True):
        del columns[_LEFT_OUT]
        seeds = str(len(by_seed) or "0, none finished")
        rows.append({"method": label, "seeds": seeds, **columns})
    return f"{caption(metric)}\n{table([list(rows[0]), *(list(row.values()) for row in rows)])}"


def _last(run: Path, metric: str) -> float | None:
    later = run / EVALUATION / METRICS
    evaluation = read_metrics(later) if later.is_file() else []
    last = last_value(rows_of(metric, read_metrics(run / METRICS), evaluation), metric)
    return last[1] if last else None
