"""Names in the folder of a run, and the rows of its metrics."""

from math import isfinite
from pathlib import Path

from megatron_rl.reporting.metrics_file import Row, read_metrics

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CURVES = "curves.png"
EVALUATION = "evaluation"
REQUEUE = "requeue"  # while a run that was stopped on request waits to be resumed


def metrics_of(folder: Path, name: str, problems: list[str]) -> tuple[list[Row], list[Row]]:
    """The rows of the training, and those of the evaluation after it, which may be none. An
    evaluation that cannot be read is added to ``problems``: the rest is still worth having.

    Raises:
        ValueError: the metrics of the training are damaged.
    """
    evaluation: list[Row] = []
    path = folder / EVALUATION / METRICS
    if path.is_file():
        try:
            evaluation = _rows(path)
        except (ValueError, OSError) as error:
            problems.append(f"{name}: its evaluation is not shown: {error}")
    return _rows(folder / METRICS), evaluation


def _rows(path: Path) -> list[Row]:
    """The rows with a number or None at each key; a number that is not finite is None."""
    rows = read_metrics(path)
    for row in rows:
        for key, value in row.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(
                    f"{path.name} is damaged: {key} of step {row['step']} is {value!r}, no number"
                )
            if value is not None and not isfinite(value):
                row[key] = None
    return rows
