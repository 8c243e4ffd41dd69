"""The table at the end of a sweep: that of a report, for the console."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_rl.reporting.comparison.runs import METRICS, Run, read_run
from megatron_rl.reporting.comparison.tables import method_table
from megatron_rl.reporting.comparison.variants import Variant
from megatron_rl.reporting.report import table
from megatron_rl.sweeping.trials import Trial

_LEFT_OUT = ("at step", "95 % of the mean")  # of the columns of a report: a line is long enough


def summary(trials: Sequence[Trial], finished: Iterable[str], metrics: Sequence[str]) -> str:
    """A table for each metric, then what is not in it.

    A row is a combination without its seed, compared with the first one at equal seed.

    Args:
        finished: the names of the trials that are; a mean with runs of other lengths says nothing.
    """
    done = set(finished)
    variants = _variants(trials, done)
    parts = [_table(variants, metric) for metric in metrics]
    missing = [trial.name for trial in trials if not trial.same_as and trial.name not in done]
    notes = []
    if missing:
        notes.append(f"not in the table, because not finished: {', '.join(missing)}")
    notes += [f"{trial.name}: the same run as {trial.same_as}" for trial in trials if trial.same_as]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _variants(trials: Sequence[Trial], finished: set[str]) -> list[Variant]:
    """The finished runs of every combination.

    A combination whose runs are all those of another one has no row of its own.
    """
    by_name = {trial.name: trial for trial in trials}
    # A trial that was not run itself still counts in its row, by the run that was made for it: with
    # method=grpo,dapo clip=0.2,0.3 a combination may equal the default of another.
    runs: dict[str, list[Run]] = {trial.label: [] for trial in trials if not trial.same_as}
    for trial in trials:
        made = by_name[trial.same_as or trial.name]
        if trial.label in runs and made.name in finished and (made.folder / METRICS).is_file():
            runs[trial.label].append(replace(read_run(made.folder, made.name, []), finished=True))
    return [Variant(label, tuple(of_label)) for label, of_label in runs.items()]


def _table(variants: Sequence[Variant], metric: str) -> str:
    found = method_table(variants, metric)
    columns = [column for column in found.rows[0] if column not in _LEFT_OUT]
    rows = [[str(row[column]) for column in columns] for row in found.rows]
    return f"{found.caption}\n{table([columns, *rows])}"
