"""A run in the trackers that ``logging.trackers`` names, each written by its own library. Rank 0.

A start that resumes continues the run that a tracker has: its id is in ``run_dir/trackers.json``.
"""

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.keys import flat
from megatron_rl.config.schema import Config, LoggingConfig
from megatron_rl.errors import concerning, first_line
from megatron_rl.reporting.metrics_file import Row, replace_text
from megatron_rl.reporting.sinks import Metrics

_FILE = "trackers.json"
_INIT_S = 30.0  # how long the server of wandb may take to answer at the start
_FINISH_S = 60.0  # how long the end of a run may take when nothing can be sent
_MLFLOW_CHARACTERS = 6000  # of a parameter
_MLFLOW_PARAMS = 100  # of one request
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    folder: Path
    record: dict[str, Any]  # what its page shows as the configuration
    place: dict[str, Any]  # where it stands among others, by the names of wandb's arguments
    online: bool
    first_step: int  # the first one that this start logs
    id: str | None = None  # of the run in the tracker; None: it is new there


@dataclass(frozen=True)
class Tracker:
    """A run in one tracker."""

    id: str  # what the library finds the run by
    log: Callable[[int, dict[str, Any]], Any]  # takes the step and its values
    # Takes the step, names of columns, and rows.
    log_samples: Callable[[int, list[str], list[list[Any]]], Any]
    close: Callable[[bool], Any]  # takes whether the run failed
    # The first step whose row is known not to be there; None: none is.
    lacks_from: int | None = None


def _wandb(run: TrackedRun) -> Tracker:
    """An offline start has a file of its own, which gets the earlier rows too."""
    import wandb

    opened = wandb.init(
        **run.place,
        mode="online" if run.online else "offline",
        dir=str(run.folder),
        id=run.id or secrets.token_hex(8),
        resume="allow" if run.online else None,
        config=run.record,
        settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S, quiet=True),
    )

    def close(failed: bool) -> None:
        opened.finish(exit_code=int(failed))
        if not run.online:
            # ``finish`` does not wait until an offline file is written, the end of wandb's own
            # process does. Online that one could wait for a network without end.
            wandb.teardown(int(failed))

    return Tracker(
        opened.id,
        lambda step, values: opened.log({"step": step, **values}, step=step),
        lambda step, *table: opened.log({"samples": wandb.Table(*table)}, step=step),
        close,
        # A start that was killed has lost its last seconds there.
        opened.step if run.first_step else 0,
    )


def _mlflow(run: TrackedRun) -> Tracker:
    """Offline into a database of the run folder: MLflow's store of plain files is frozen."""
    artifacts = None
    uri = None  # that of the environment
    if not run.online:
        # Read at the import: what is offline reports nothing to the library's makers either.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        store = run.folder / "mlflow"
        store.mkdir(exist_ok=True)
        artifacts = store.as_uri()
        uri = f"sqlite:///{store}/mlflow.db"
    import mlflow
    from mlflow.entities import Metric, Param

    client = mlflow.MlflowClient(uri)
    number = run.id
    if number is None:
        project = run.place["project"]
        known = client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else client.create_experiment(project, artifacts)
        tags = {key: str(run.place[key]) for key in ("group", "job_type", "tags")}
        number = client.create_run(experiment, tags=tags).info.run_id
        # A parameter cannot be changed: what a later start has is in config.json.
        settings = list(flat(run.record))
        params = [Param(_plain(key), str(value)[:_MLFLOW_CHARACTERS]) for key, value in settings]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            client.log_batch(number, params=params[first : first + _MLFLOW_PARAMS])
    client.update_run(number, status="RUNNING", name=run.place["name"])
    client.log_dict(number, run.record, "config.json")

    def log(step: int, values: dict[str, Any]) -> None:
        now_ms = int(time.time() * 1000)
        points = [Metric(_plain(key), value, now_ms, step) for key, value in values.items()]
        client.log_batch(number, metrics=points)

    def log_samples(step: int, columns: list[str], rows: list[list[Any]]) -> None:
        # A file a step: of a table that grows the library reads and writes the whole.
        table = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
        client.log_table(number, table, f"samples/step_{step:06d}.json")

    def close(failed: bool) -> None:
        client.set_terminated(number, "FAILED" if failed else "FINISHED")

    return Tracker(number, log, log_samples, close)


def _plain(key: str) -> str:
    """``key`` in the characters that MLflow takes."""
    return re.sub(r"[^\w. :/-]", "_", key, flags=re.ASCII)


def _tensorboard(run: TrackedRun) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Its page drops what an earlier start wrote of the steps that are done again.
    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step or None)
    writer.add_text("config", f"```json\n{json.dumps(run.record, indent=2)}\n```", run.first_step)

    def log(step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    # It has no tables.
    return Tracker("tensorboard", log, lambda *samples: None, lambda failed: writer.close())


def _trackio(run: TrackedRun) -> Tracker:
    """Finds a run by its name, which therefore has an end of its own."""
    if not run.online:
        # Read at the import. A folder that the user has set, for all runs, stays.
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            with suppress(KeyError):
                del os.environ[variable]
    import trackio

    place = dict(run.place)
    config = {**run.record, "tags": place.pop("tags"), "job_type": place.pop("job_type")}
    place["name"] = run.id or f"{place['name']}-{secrets.token_hex(3)}"
    opened = trackio.init(**place, config=config, resume="allow", embed=False)
    return Tracker(
        place["name"],
        lambda step, values: opened.log(values, step=step),
        lambda step, columns, rows: opened.log(
            {"samples": trackio.Table(columns=columns, data=rows)}, step=step
        ),
        lambda failed: opened.finish(),
    )


def _swanlab(run: TrackedRun) -> Tracker:
    """An offline start has a folder of its own, which gets the earlier rows too."""
    import swanlab

    number = run.id or secrets.token_hex(8)
    opened = swanlab.init(
        **run.place,
        mode="online" if run.online else "offline",
        log_dir=str(run.folder / "swanlab"),
        id=number,
        resume="allow",
        config=run.record,
    )

    def log_samples(step: int, columns: list[str], rows: list[list[Any]]) -> None:
        table = swanlab.echarts.Table().add(columns, [[str(cell) for cell in row] for row in rows])
        opened.log({"samples": table}, step=step)

    return Tracker(
        number,
        lambda step, values: opened.log(values, step=step),
        log_samples,
        lambda failed: opened.finish("crashed" if failed else "success"),
        None if run.online else 0,
    )


# By the name in logging.trackers, which is that of the module and of the extra of setup.py.
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "swanlab": _swanlab,
}


class Tracking:
    """One that fails gets nothing more in this start, and a warning says so; the next start gives
    it the rows that it lacks."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        record: dict[str, Any],
        first_step: int,
        earlier: Sequence[Row],
    ) -> None:
        """Opens the trackers.

        Args:
            record: what they show as the configuration.
            first_step: the first one that this start logs.
            earlier: the rows of the steps before.

        Raises:
            ValueError: a library cannot open its run.
        """
        self._file = folder / _FILE
        text = self._file.read_text(encoding="utf-8") if self._file.is_file() else "{}"
        with concerning(str(self._file), "delete it, and the trackers get new runs"):
            self._runs: dict[str, dict[str, Any]] = json.loads(text)
        self._open: dict[str, Tracker] = {}
        self._step = first_step
        wanted = config.logging
        tags = (config.method.name, f"seed={config.seed}", *wanted.tags)
        place = {
            "project": wanted.project,
            "name": wanted.run_name or folder.name,
            "group": wanted.group,
            "job_type": wanted.job_type,
            "tags": list(dict.fromkeys(tags)),  # the user may repeat the run's
        }
        for name in wanted.trackers:
            known = self._runs.get(name, {"id": None, "lacks_from": 0})
            run = TrackedRun(folder, record, place, wanted.online, first_step, known["id"])
            self._add(name, run, known["lacks_from"], earlier)

    def _add(
        self, name: str, run: TrackedRun, lacks_from: int | None, earlier: Sequence[Row]
    ) -> None:
        remedy = f"leave {name} out, or remove it from {self._file}, which names its run"
        if run.online:
            remedy = "is the network there? logging.online=false needs none"
        with concerning(f"logging.trackers: {name}", remedy):
            tracker = TRACKERS[name](run)
        self._open[name] = tracker
        lacking = (lacks_from, tracker.lacks_from)
        first = min((step for step in lacking if step is not None), default=run.first_step)
        # Until it has got them: this start may end before.
        self._note(name, first)
        with self._guarded(name):
            for row in earlier:
                values = {key: math.nan if value is None else value for key, value in row.items()}
                if values["step"] >= first:
                    _log(tracker, values)
            self._note(name, None)

    def log(self, metrics: Metrics) -> None:
        self._step = int(metrics["step"])
        self._tell(lambda tracker: _log(tracker, metrics))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """``samples``: rows of samples.jsonl."""
        self._step = step
        columns = list(dict.fromkeys(key for row in samples for key in row))
        rows = [[row.get(key) for key in columns] for row in samples]
        self._tell(lambda tracker: tracker.log_samples(step, columns, rows))

    def close(self, *, failed: bool = False) -> None:
        """Sends or writes what is left. Without it the last seconds before the end of the process
        are lost: its end is no orderly one (``runtime/guard/failure.py``)."""
        self._tell(lambda tracker: tracker.close(failed))
        self._open.clear()

    def _tell(self, what: Callable[[Tracker], Any]) -> None:
        for name, tracker in tuple(self._open.items()):
            with self._guarded(name):
                what(tracker)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (of the library, its database, its HTTP client)
            if self._runs[name]["lacks_from"] is None:
                self._note(name, self._step)
            tracker = self._open.pop(name)
            with suppress(Exception):  # what it has taken is to be there
                tracker.close(True)
            logger.warning(
                "logging.trackers: %s failed at step %d (%s): it gets nothing more in this start;"
                " metrics.jsonl has every row, and a start that resumes sends them",
                name,
                self._step,
                first_line(error),
            )

    def _note(self, name: str, lacks_from: int | None) -> None:
        self._runs[name] = {"id": self._open[name].id, "lacks_from": lacks_from}
        replace_text(self._file, json.dumps(self._runs, indent=2) + "\n")


def _log(tracker: Tracker, metrics: Metrics) -> None:
    values = {key: value for key, value in metrics.items() if key != "step"}
    tracker.log(int(metrics["step"]), values)


def check_accounts(logging: LoggingConfig) -> None:
    """Whether the services that are to get the run are known here; asks no network.

    Raises:
        ValueError: one is not.
    """
    remedy = (
        "run `wandb login` or `swanlab login`, set MLFLOW_TRACKING_URI, or logging.online=false"
    )
    for name in logging.trackers if logging.online else ():
        with concerning(f"logging.trackers: {name}", remedy):
            if not _has_account(name):
                raise ValueError("no account or server is known here")


def _has_account(name: str) -> bool:
    if name == "wandb":
        import wandb

        return wandb.login(prompt=False, verify=False)
    if name == "mlflow":
        import mlflow

        return mlflow.is_tracking_uri_set()
    if name == "swanlab":
        import swanlab

        return swanlab.Settings().api_key is not None
    return True
