"""Reads what trackers leave of a run in its folder, by their own libraries where these can."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.reporting.wandb_file import read_runs


@dataclass
class Stored:
    """What the page of a tracker would show of a run. ``points`` and ``samples``: by step."""

    id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    points: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self.points.setdefault(step, {}).update(values)


def _table(columns: list[str], rows: list[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def in_wandb(run: Path) -> Stored:
    last = read_runs(run)[-1]
    stored = Stored(last.about.run_id, last.config)
    for row in last.history:
        step = int(row["_step"])
        if "samples.path" in row:
            (file,) = run.glob(f"wandb/offline-run-*/files/{row['samples.path']}")
            table = json.loads(file.read_text())
            stored.samples[step] = _table(table["columns"], table["data"])
        values = {key: row[key] for key in row if not key.startswith(("_", "samples", "step"))}
        if values:
            stored.put(step, {key: float(value) for key, value in values.items()})
    return stored


def in_mlflow(run: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    folder = Path(found.info.artifact_uri.removeprefix("file://"))
    stored = Stored(found.info.run_id, json.loads((folder / "config.json").read_text()))
    assert found.data.params["method.name"] == stored.config["method"]["name"]
    assert found.info.status == "FINISHED"
    for key in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, key)
        for point in sorted(history, key=lambda point: point.timestamp):
            stored.put(point.step, {key: point.value})
    for file in folder.glob("samples/step_*.json"):
        table = json.loads(file.read_text())
        stored.samples[int(file.stem[-6:])] = _table(table["columns"], table["data"])
    return stored


def in_tensorboard(run: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")[-1].tensor_proto.string_val
    lines = text.decode().splitlines()
    stored = Stored("tensorboard", json.loads("".join(lines[1:-1])))
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            stored.put(event.step, {key: event.value})
    return stored


def in_trackio(run: Path) -> Stored:
    """The library takes its folder from the first run of a process: a project is a test's own."""
    from trackio.utils import TRACKIO_DIR

    assert (TRACKIO_DIR.parent / "metrics.jsonl").is_file()
    project = json.loads((run / "config.json").read_text())["logging"]["project"]
    with closing(sqlite3.connect(TRACKIO_DIR / f"{project}.db")) as database:
        ((name,),) = database.execute("select distinct run_name from metrics")
        ((config,),) = database.execute("select config from configs")
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    stored = Stored(name, json.loads(config))
    for step, text in rows:
        values = json.loads(text)
        if "samples" in values:
            stored.samples[step] = values["samples"]["_value"]
        else:
            stored.put(step, {key: float(value) for key, value in values.items()})
    return stored


def in_swanlab(run: Path) -> Stored:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    file = max(run.glob("swanlab/run-*/run-*.swanlab"), key=lambda file: file.stat().st_mtime)
    config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
    stored = Stored(config={key: entry["value"] for key, entry in config.items()})
    reader = DataStoreReader()
    reader.open(file)
    for content in reader:
        record = Record()
        record.ParseFromString(content)
        if record.HasField("start"):
            stored.id = record.start.id
        if record.HasField("scalar"):
            stored.put(record.scalar.step, {record.scalar.key: record.scalar.value.number})
        if record.HasField("media"):
            name = record.media.value.items[0].filename
            table = json.loads((file.parent / "media" / "echarts" / name).read_text())
            stored.samples[record.media.step] = table["rowData"]
    reader.close()
    return stored


STORED: Mapping[str, Callable[[Path], Stored]] = {
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "tensorboard": in_tensorboard,
    "trackio": in_trackio,
    "swanlab": in_swanlab,
}


def same(stored: float, written: float | None) -> bool:
    """A value that was not finite is null in metrics.jsonl; TensorBoard keeps float32."""
    if written is None:
        return not math.isfinite(stored)
    return math.isclose(stored, written, rel_tol=1e-6, abs_tol=1e-12)
