"""The resume point of a run: its checkpoint, whether it is the same run, or whether it is over; its
best score and its settings, for programs that ask a model without training it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoints import directory
from megatron_rl.config.load import fill_missing
from megatron_rl.config.schema import Config
from megatron_rl.reporting.metrics_file import check_rows, read_metrics
from megatron_rl.reporting.report import report
from megatron_rl.run.files import CONFIG, CURVES, METRICS, REQUEUE
from megatron_rl.run.run_record import Difference, describe, differences, listed, read_record
from megatron_rl.runtime import disk
from megatron_rl.runtime.launch import World

CHECKPOINTS = "checkpoints"
EXPORTS = "exports"
STACKS = "stacks"
LOGS = "logs"
_LARGE_BYTES = 10**10
logger = logging.getLogger(__name__)


@dataclass
class Scores:
    """Follows one metric over the evaluations of a run; all ranks see the same metrics.

    Example: after 0.1, 0.3, 0.2 the best is 0.3 and one evaluation has passed without a better one.
    """

    metric: str  # its key, larger is better, such as ``eval/accuracy``
    # Evaluations without a better score that make ``exhausted`` true; None = never.
    stop_after: int | None
    best_step: int | None = None
    best: float | None = None
    without_better: int = 0

    def note(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metrics of a step hold the best score so far; False where they hold none.

        Raises:
            ValueError: an evaluation did not give the metric.
        """
        value = metrics.get(self.metric)
        if value is None:
            others = sorted(key for key in metrics if key.startswith("eval/"))
            if others and self.metric not in metrics:
                raise ValueError(
                    f"checkpoint.best_metric = {self.metric}: an evaluation gives no such metric; "
                    f"choose one of {', '.join(others)}"
                )
            return False
        if self.best is not None and value <= self.best:
            self.without_better += 1
            return False
        self.best = value
        self.best_step = int(metrics["step"])
        self.without_better = 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether ``stop_after`` evaluations in a row brought no better score."""
        return self.stop_after is not None and self.without_better >= self.stop_after

    def as_text(self) -> str:
        """Example: "best eval/accuracy 0.535 at step 150"; empty before the first evaluation."""
        if self.best is None:
            return ""
        return f"best {self.metric} {self.best:.3f} at step {self.best_step}"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint and step from which a run starts."""

    checkpoint: Path | None  # None: from the model
    step: int  # the last one that is done
    # Settings that differ from those of the run so far, and are allowed to.
    changes: tuple[Difference, ...] = ()


def with_date(config: Config, world: World) -> Config:
    """Collective: ``config`` with the day that chat templates show: as given, or that of the run so
    far, or today. A run whose prompts change at midnight could not be resumed."""
    record = world.from_main(lambda: read_record(Path(config.run_dir) / CONFIG))
    return _with_date_of(record, config, world.from_main(lambda: str(date.today())))


def _with_date_of(record: dict[str, Any] | None, config: Config, today: str | None) -> Config:
    """``config`` with the day as given, or that of the run so far, or ``today``."""
    day = config.data.template_date or (record or {}).get("data", {}).get("template_date") or today
    return config.with_values(data={"template_date": day})


def _with_steps_of(record: dict[str, Any], config: Config) -> Config:
    """``config`` with the number of steps that the same epochs had in the run so far, whose prompts
    are the same; None where they have not been counted."""
    written = record["trainer"]
    trainer = config.trainer
    if trainer.num_steps is not None or written.get("num_epochs") != trainer.num_epochs:
        return config
    return config.with_values(trainer={"num_steps": written["num_steps"]})


def finished_already(config: Config, world: World) -> bool:
    """Collective: whether the run is finished, down to its export; then its table has been printed.
    Raises ValueError as ``finished_text`` does."""
    text = world.from_main(lambda: finished_text(config))
    if text is not None and world.is_main:
        print(text, flush=True)
    return text is not None


def finished_text(config: Config) -> str | None:
    """The final message of a run that is finished in this folder; None where work is left.

    Raises:
        ValueError: the folder holds a run with other settings, or one that is longer.
    """
    folder = Path(config.run_dir)
    record = read_record(folder / CONFIG)
    newest = directory.newest(folder / CHECKPOINTS)
    if (
        config.resume.checkpoint != "auto"
        or record is None
        or newest is None
        or directory.problem(newest)
    ):
        return None
    changes = differences(record, describe(_with_date_of(record, config, None), 1, None))
    # The prompts have not been read: a change of ``data`` alone may still be the same content.
    if any(not change.key.startswith("data.") for change in changes):
        _refuse_changes(config, f"{folder} holds", changes)
    step = directory.step_of(newest) or 0
    config = _with_steps_of(record, config)
    if config.trainer.num_steps is None:
        return None
    _refuse_fewer_steps(config, newest, step)
    check_rows(folder / METRICS)
    scores = scores_until(config, step)
    exported = not config.checkpoint.export_at_end or (folder / "export" / "config.json").is_file()
    # The figure is the last thing that a run writes.
    whole = exported and (folder / CURVES).is_file() and not (folder / REQUEUE).exists()
    over = step == config.trainer.steps or scores.exhausted
    if changes or not whole or not over:
        return None
    found_at = f"already finished at step {step}, nothing is left to do: {results(config, scores)}"
    return f"{report(folder / METRICS)}\n{found_at}"


def results(config: Config, scores: Scores) -> str:
    """The locations of all results, for the last line of a run."""
    folder = Path(config.run_dir)
    places = [f"run_dir {folder} ({METRICS}, {CURVES})"]
    if config.checkpoint.export_at_end:
        places.append(f"export {folder / 'export'}")
    if scores.best is not None:
        best = scores.as_text()
        if has_best(config, scores):
            best += f" ({directory.step_path(folder / CHECKPOINTS, scores.best_step or 0)})"
        places.append(best)
    return ", ".join(places)


def has_best(config: Config, scores: Scores) -> bool:
    """Whether the checkpoint with the best score is kept. The model of the start has none."""
    path = directory.step_path(Path(config.run_dir) / CHECKPOINTS, scores.best_step or 0)
    return config.checkpoint.keep_best and path.is_dir()


def scores_until(config: Config, step: int) -> Scores:
    """The evaluations of the run up to ``step``, as its metrics have them."""
    scores = Scores(config.checkpoint.best_metric, config.evaluation.stop_after)
    path = Path(config.run_dir) / METRICS
    for row in read_metrics(path) if path.is_file() else []:
        if row["step"] <= step:
            scores.note({"step": row["step"], scores.metric: row.get(scores.metric)})
    return scores


def find_resume_point(config: Config, world: World, record: dict[str, Any]) -> ResumePoint:
    """Collective: the checkpoint to resume from, read and compared with this run.

    Args:
        record: what ``describe`` says of this start; used on rank 0.

    Raises:
        ValueError: there is none where there must be one, it is damaged, or the run is another.
    """
    resume = config.resume.checkpoint
    if resume == "auto":
        return _newest_resume_point(config, world, record)
    world.from_main(lambda: _refuse_used(config))
    if resume == "never":
        return ResumePoint(None, 0)
    path = Path(resume)
    step = world.from_main(lambda: _step_of(path))
    if config.checkpoint.verify and (wrong := digest_problem(world, path)):
        raise ValueError(f"resume.checkpoint = {path}: {wrong}; choose another checkpoint")
    written = world.from_main(lambda: directory.check(path).get("run"))
    start = ResumePoint(path, step)
    subject = f"checkpoint {path} was written by"
    return world.from_main(lambda: _compared(config, written, record, start, subject))


def _newest_resume_point(config: Config, world: World, record: dict[str, Any]) -> ResumePoint:
    """Collective: after the newest whole checkpoint of the folder, else from the model."""
    folder = Path(config.run_dir)
    newest = newest_whole(world, folder / CHECKPOINTS, digests=config.checkpoint.verify)
    world.from_main(lambda: _refuse_all_damaged(config, newest))
    start = ResumePoint(newest, directory.step_of(newest) or 0 if newest else 0)
    used = world.from_main(lambda: newest is not None or (folder / METRICS).is_file())
    written = world.from_main(lambda: _record_of(folder, newest)) if used else None
    return world.from_main(lambda: _compared(config, written, record, start, f"{folder} holds"))


def _record_of(folder: Path, checkpoint: Path | None) -> dict[str, Any] | None:
    """The record of the run in the folder, or in the checkpoint where that file is missing."""
    record = read_record(folder / CONFIG)
    if record is None:
        record = directory.check(checkpoint).get("run") if checkpoint else None
        taken = f"that of {checkpoint.name} is taken" if record and checkpoint else None
        logger.warning("%s is missing; %s", folder / CONFIG, taken or "settings are not compared")
    return record


def _compared(
    config: Config,
    old: dict[str, Any] | None,
    record: dict[str, Any],
    start: ResumePoint,
    subject: str,
) -> ResumePoint:
    """``start`` with what differs between the run of before and this one."""
    changes = differences(old, record) if old is not None else []
    if changes:
        _refuse_changes(config, subject, changes)
    if start.checkpoint is not None:
        _refuse_fewer_steps(config, start.checkpoint, start.step)
    return replace(start, changes=tuple(changes))


def _refuse_changes(config: Config, subject: str, changes: list[Difference]) -> None:
    """Raises ValueError unless ``resume.changed`` allows the changes."""
    if config.resume.changed == "allow":
        return
    raise ValueError(
        f"resume.checkpoint = {config.resume.checkpoint}: {subject} a run with other settings:"
        f"{listed(changes)}\ngive another run_dir for a new run, set these as they were to "
        "resume the old one, or continue with resume.changed=allow (recorded in "
        f"{config.run_dir}/changes.jsonl)"
    )


def _refuse_fewer_steps(config: Config, checkpoint: Path, step: int) -> None:
    """Raises ValueError when the checkpoint is of a later step than the run is to have."""
    if step > config.trainer.steps:
        raise ValueError(
            f"trainer.num_steps = {config.trainer.steps}: {checkpoint} has {step} steps "
            "already; raise it, give another run_dir, or resume=PATH of an earlier checkpoint"
        )


def _refuse_used(config: Config) -> None:
    """A run from its start, or from a checkpoint of another folder, needs a folder without one."""
    folder = Path(config.run_dir)
    resume = config.resume.checkpoint
    if resume != "never" and Path(resume).resolve().is_relative_to(folder.resolve()):
        return
    if (folder / METRICS).exists() or directory.newest(folder / CHECKPOINTS) is not None:
        raise ValueError(
            f"resume.checkpoint = {resume}: {folder} already holds a run; resume=auto continues "
            "it, or give another run_dir"
        )


def _refuse_all_damaged(config: Config, found: Path | None) -> None:
    root = Path(config.run_dir) / CHECKPOINTS
    if found is None and directory.newest(root) is not None:
        raise ValueError(
            f"resume.checkpoint = auto: no checkpoint of {root} is whole; bring one back, delete"
            " them all to start from step 0 (the metrics so far are then archived), or give"
            " another run_dir"
        )


def _step_of(path: Path) -> int:
    """The step in the manifest, else in the name; 0 where neither has it."""
    wrong = directory.problem(path)
    if wrong is not None:
        remedy = f"give one whole checkpoint (run_dir/{CHECKPOINTS}/step_NNNNNN)"
        if (path / "config.json").is_file():
            remedy += f", or start a new run from these weights: model.path={path}"
        raise ValueError(f"resume.checkpoint = {path}: {wrong}; {remedy}")
    info = directory.check(path)
    return int(info["step"]) if "step" in info else directory.step_of(path) or 0


def newest_whole(world: World, root: Path, *, digests: bool) -> Path | None:
    """Collective: the newest whole checkpoint, with ``digests`` to the last bit."""
    below: int | None = None
    while True:
        path = world.from_main(partial(directory.newest_valid, root, below))
        if path is None or not digests:
            return path
        wrong = digest_problem(world, path)
        if wrong is None:
            return path
        logger.warning("checkpoint %s is skipped: %s", path, wrong)
        below = directory.step_of(path)


def digest_problem(world: World, path: Path) -> str | None:
    """Collective: a file of a checkpoint that is not what was written; each rank reads a share."""
    names = world.from_main(lambda: directory.file_names(path))
    if world.is_main and (size := disk.used_bytes(path)) > _LARGE_BYTES:
        logger.info(
            "reading %s of %s to compare digests (checkpoint.verify=false does not)",
            disk.as_text(size),
            path,
        )
    found = world.all_gather(directory.damaged(path, names[world.rank :: world.size]))
    return next((wrong for wrong in found if wrong is not None), None)


def read_config(folder: Path) -> Mapping[str, Any]:
    """``config.json`` of a run or a model; empty where there is none."""
    values = read_record(folder / CONFIG)
    return values if isinstance(values, Mapping) else {}


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run."""
    return "run_dir" in read_config(folder)


def values_of_run(run: Path) -> dict[str, Any]:
    """The configuration of a run, as it was composed; keys that came with a later version of the
    program have their defaults, and are logged."""
    saved = read_config(run)
    values = {key: saved[key] for key in Config.model_fields if key in saved}
    added = fill_missing(Config, values)
    if added:
        logger.warning("%s is older than these keys, which count as %s", run, ", ".join(added))
    return values


def engine_of_machine() -> str:
    """The option of the group ``rollout`` for this machine."""
    return "vllm" if torch.cuda.is_available() else "vllm_cpu"
