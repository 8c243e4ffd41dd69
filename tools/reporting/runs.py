"""The runs below some folders, as their files tell."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.keys import flat, natural
from megatron_rl.reporting.metrics_file import Row
from megatron_rl.reporting.scores import last_value, rows_of
from megatron_rl.run.files import CONFIG, CURVES, METRICS, REQUEUE, metrics_of

ABSENT = "(absent)"

Record = Mapping[str, Any]  # config.json


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    name: str  # its path below the folder that was searched
    record: Record
    settings: Mapping[str, Any]  # the record under dotted names
    rows: list[Row]  # its metrics
    evaluation: list[Row]  # metrics of an evaluation after the training; may be empty
    finished: bool

    @property
    def seed(self) -> int:
        return int(self.record["seed"])

    @property
    def method(self) -> str:
        return str(self.setting("method.name"))

    @property
    def steps_done(self) -> int:
        return int(self.rows[-1]["step"] or 0)

    @property
    def steps_wanted(self) -> int:
        return int(self.settings["trainer.num_steps"])

    def setting(self, key: str) -> Any:
        """``ABSENT`` where the run has no such setting."""
        return self.settings[key] if key in self.settings else ABSENT

    def rows_of(self, key: str) -> list[Row]:
        return rows_of(key, self.rows, self.evaluation)

    def last_value(self, metric: str) -> tuple[int, float] | None:
        return last_value(self.rows_of(metric), metric)


class Found(NamedTuple):
    """Runs by folder and name; a sentence on each that cannot be read, or only in part."""

    runs: list[Run]
    problems: list[str]


def find_runs(places: Sequence[Path]) -> Found:
    """Every run in or below ``places``: a folder with the ``config.json`` of a run and a
    ``metrics.jsonl``. What lies below a run is part of it.

    Raises:
        ValueError: a place does not exist, or no run can be read.
    """
    runs: list[Run] = []
    problems: list[str] = []
    seen: set[Path] = set()
    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place}: no such folder; give folders that hold runs")
        for folder in _candidates(place, problems):
            real = folder.resolve()
            if real in seen:
                continue
            seen.add(real)
            inner = folder.relative_to(place).as_posix()
            name = real.name if inner == "." else inner
            try:
                runs.append(read_run(folder, name, problems))
            except (ValueError, OSError) as error:
                problems.append(f"{name}: left out: {error}")
    if not runs:
        listed = ", ".join(map(str, places))
        reasons = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(
            f"{listed}: no run that can be read; a run is a folder with {CONFIG} and {METRICS}, as "
            f"run_dir of a training leaves it{reasons}"
        )
    return Found(runs, problems)


def _candidates(place: Path, problems: list[str]) -> Iterator[Path]:
    """Folders that look like a run, by name; not searched further below, nor are links. Folders
    that cannot be listed are added to ``problems``."""

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: cannot be searched ({error.strerror})")

    for path, folders, files in os.walk(place, onerror=unreadable):
        folder = Path(path)
        # os.walk continues with what this list holds when it is asked for more: none, or in order.
        if _looks_like_run(folder, files):
            folders.clear()
            yield folder
        folders.sort(key=natural)


def _looks_like_run(folder: Path, files: Sequence[str]) -> bool:
    """``config.json`` alone may also be that of a model."""
    if CONFIG not in files:
        return False
    if METRICS in files:
        return True
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return False
    return isinstance(record, dict) and "run_dir" in record


def read_run(folder: Path, name: str, problems: list[str]) -> Run:
    """The run; what of it is damaged but not needed is added to ``problems``."""
    record, settings = _record(folder / CONFIG)
    rows, evaluation = metrics_of(folder, name, problems)
    if not rows:
        raise ValueError(f"{METRICS} has no row yet")
    done = int(rows[-1]["step"] or 0)
    # A run is over after its last step. Where it may end before, the figure tells, the last thing
    # that a run writes; where it may not, that figure is of its end before it was made longer.
    ended = (folder / CURVES).is_file() and not (folder / REQUEUE).exists()
    may_end_early = settings.get("evaluation.stop_after") is not None
    finished = done >= int(settings["trainer.num_steps"]) or (may_end_early and ended)
    return Run(folder, name, record, settings, rows, evaluation, finished)


def _record(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json``, and its settings under dotted names."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error})") from None
    settings = dict(flat(record)) if isinstance(record, dict) else {}
    for key in ("seed", "trainer.num_steps"):
        if not isinstance(settings.get(key), int):
            raise ValueError(f"{path.name} is not that of a run: it lacks {key}")
    return record, settings
