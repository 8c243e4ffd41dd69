"""The folder of a run: what is in it, who writes it (rank 0), and how a run resumes from it.

``config.json`` (resolved configuration, versions, commit), ``metrics.jsonl``, ``samples.jsonl``,
``checkpoints/step_NNNNNN``, ``export`` (HF), ``exports/step_NNNNNN``, ``best.json``,
``curves.png``; ``trackers.json`` and a folder of each tracker; ``changes.jsonl`` where a start with
other settings was allowed;
``*.overwritten.jsonl``: rows of steps that a later start repeated; ``requeue`` while a preempted
run waits to be resumed; ``failed_host``, the machine on which the last start failed, until the
next; ``.lock``, held by the live run.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from megatron_rl.checkpoints.directory import later_steps, prune, step_path
from megatron_rl.config.schema import Config
from megatron_rl.errors import first_line
from megatron_rl.protocols import Policy, RolloutSource, Saving
from megatron_rl.reporting.figure import draw_curves
from megatron_rl.reporting.metrics_file import (
    archive_rows,
    missing_steps,
    read_metrics,
    replace_text,
)
from megatron_rl.reporting.report import report
from megatron_rl.reporting.sinks import ConsoleLine, Metrics, append_metrics
from megatron_rl.reporting.tracking import Tracking
from megatron_rl.rollouts.rows.experience import Response
from megatron_rl.run.files import CONFIG, CURVES, METRICS, REQUEUE, SAMPLES
from megatron_rl.run.preflight import claim
from megatron_rl.run.run_record import describe, listed
from megatron_rl.run.start import (
    CHECKPOINTS,
    EXPORTS,
    ResumePoint,
    Scores,
    find_resume_point,
    has_best,
    results,
    scores_until,
)
from megatron_rl.runtime import disk, random_state
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.first_failure import FAILED_HOST
from megatron_rl.runtime.launch import World
from megatron_rl.signals import Signals

# How long a run that ends by an error waits for the checkpoint that is being written.
_LAST_WRITE_S = 60.0
logger = logging.getLogger(__name__)


class RunFolder:
    """Created on every rank; only rank 0 touches the disk, but for the shards of a checkpoint."""

    def __init__(
        self, config: Config, world: World, display: Display, signals: Signals | None = None
    ) -> None:
        self._config = config
        self._world = world
        self._display = display
        self.path = Path(config.run_dir)
        # Those of the learner: their state is in every checkpoint.
        self.signals = signals or Signals()
        self._writers: list[Callable[[Metrics], None]] = []
        self._tracking: Tracking | None = None
        self._start: ResumePoint | None = None
        self._record: dict[str, Any] = {}
        self.scores = Scores(config.checkpoint.best_metric, config.evaluation.stop_after)
        self._saving: tuple[int, Saving] | None = None  # its step, and where it is
        self._saved_at = monotonic()  # read on rank 0

    def prepare(self, data: str | None = None) -> ResumePoint:
        """Collective: takes the folder for this run and finds where it resumes. Call it before the
        engines are built, which takes long.

        Args:
            data: fingerprint of the training prompts.

        Raises:
            ValueError: the folder cannot be used, or holds another run.
        """
        config = self._config
        world = self._world
        world.from_main(lambda: claim(config, world.launch_id))
        failure.STATE.failed_host = self.path / FAILED_HOST
        self._record = world.from_main(lambda: describe(config, world.size, data))
        self._start = find_resume_point(config, world, self._record)
        return self._start

    def resume(self, policy: Policy, source: RolloutSource) -> int:
        """Restores the state that ``prepare`` found and opens the logs; returns the last finished
        step (0 = from the start)."""
        start = self._start or self.prepare()
        if start.checkpoint is not None:
            extra = policy.load(start.checkpoint)
            self._restore_data(source, extra)
            states = extra["random_states"]
            random_state.restore(states[self._world.rank % len(states)])
            start = ResumePoint(start.checkpoint, extra["step"], start.changes)
        if self._world.is_main:
            self._open(start)
        self.scores = self._world.from_main(lambda: scores_until(self._config, start.step))
        if start.checkpoint is not None and self._world.is_main:
            print(f"resumed from {start.checkpoint} (step {start.step})", flush=True)
        self._saved_at = monotonic()
        return start.step

    def save_due(self, step: int, improved: bool) -> bool:
        """Collective: a checkpoint follows ``step``. ``improved``: it has the best score so far."""
        config = self._config.checkpoint
        by_step = config.every_steps > 0 and step % config.every_steps == 0
        due = by_step or (config.keep_best and improved)
        if due or config.every_minutes == 0:
            return due
        # Clocks differ: that of rank 0 decides.
        minutes = (monotonic() - self._saved_at) / 60
        return self._world.any(self._world.is_main and minutes >= config.every_minutes)

    def export_due(self, step: int) -> bool:
        every = self._config.checkpoint.export_every_steps
        return every > 0 and step % every == 0

    def save(self, step: int, policy: Policy, source: RolloutSource, *, wait: bool = True) -> None:
        """Collective. ``checkpoints/step_NNNNNN``; keeps the newest ``checkpoint.keep``, those of
        every ``keep_every_steps`` and, with ``keep_best``, the best one.

        Args:
            wait: until it is whole; else, with ``checkpoint.background``, it is written while the
                run continues, and ``check_save`` tells how that went.
        """
        self.check_save(wait=True)
        states = self._world.all_gather(random_state.capture())
        about = {"step": step, "run": self._record}
        extra = {
            "step": step,
            "rollouts": source.state(),
            "random_states": states,
            "signals": self.signals.state(),
        }
        path = step_path(self.path / CHECKPOINTS, step)
        keep = partial(self._keep, copy(self.scores))
        if self._config.checkpoint.background:
            self._saving = (step, policy.start_save(path, extra, about, keep))
            self.check_save(wait=wait)
        else:
            policy.save(path, extra, about)
            self._world.from_main(keep)
            failure.saved(step)
        self._saved_at = monotonic()

    def save_unless_there(self, step: int, policy: Policy, source: RolloutSource) -> None:
        """Collective. For a run that has to wait and may end meanwhile: a whole checkpoint."""
        self.check_save(wait=True)
        if not self._world.from_main(step_path(self.path / CHECKPOINTS, step).exists):
            self.save(step, policy, source)

    def check_save(self, *, wait: bool = False) -> None:
        """Collective: looks after a checkpoint that is being written; ``wait``: until it is whole.

        Raises:
            ValueError: the disk of some rank is full. Every rank raises.
            RuntimeError: some rank could not write for another reason.
        """
        if self._saving is None:
            return
        step, saving = self._saving
        if saving.check(self._world.all_gather, wait=wait):
            self._saving = None
            failure.saved(step)

    def end_save(self) -> None:
        """Not collective, when the run ends by an error: what is on its way to the disk gets there,
        as far as this process can see to it."""
        if self._saving is not None:
            self._saving[1].end(_LAST_WRITE_S)
        self._close(failed=True)

    def _keep(self, scores: Scores) -> None:
        """Removes old checkpoints, and says in ``best.json`` which is the best (rank 0).

        Args:
            scores: as they were when the newest was saved.
        """
        config = self._config.checkpoint
        protected = [scores.best_step] if config.keep_best and scores.best_step is not None else []
        prune(self.path / CHECKPOINTS, config.keep, protected, config.keep_every_steps)
        if protected:
            kept = has_best(self._config, scores)
            name = step_path(self.path / CHECKPOINTS, protected[0]).name if kept else None
            best = {"metric": scores.metric, "score": scores.best, "step": scores.best_step}
            best["checkpoint"] = name
            replace_text(self.path / "best.json", json.dumps(best) + "\n")

    def export(self, step: int, policy: Policy) -> None:
        """Collective. ``exports/step_NNNNNN``; nothing removes them."""
        self._world.from_main(lambda: (self.path / EXPORTS).mkdir(exist_ok=True))
        policy.export(step_path(self.path / EXPORTS, step))

    def log(self, metrics: Metrics) -> None:
        """Adds a line to ``metrics.jsonl`` and to the other sinks (rank 0)."""
        with disk.room_for(self.path, 0, "a line of metrics"):
            for write in self._writers:
                write(metrics)

    def log_samples(self, step: int, responses: Sequence[Response]) -> None:
        """Writes these responses of the step, as text, to ``samples.jsonl``
        and to the trackers; called on rank 0."""
        rows = [_sample(step, response) for response in responses]
        with (
            disk.room_for(self.path, 0, "samples"),
            (self.path / SAMPLES).open("a", encoding="utf-8") as file,
        ):
            file.writelines(json.dumps(row) + "\n" for row in rows)
        if self._tracking is not None:
            # A table has no place for the turns, which ``response`` has all of.
            kept = [{key: row[key] for key in row if key != "turns"} for row in rows]
            self._tracking.log_samples(step, kept)

    def request_requeue(self, step: int) -> None:
        """Tells the launcher script of the preemption: exit codes do not survive torchrun."""
        if self._world.is_main:
            (self.path / REQUEUE).write_text(f"{step}\n", encoding="ascii")
            self._close()
            print(f"stop requested: saved step {step}; start again with resume=auto", flush=True)

    def finish(self, policy: Policy) -> None:
        """The HF export and the figure."""
        if self._config.checkpoint.export_at_end:
            policy.export(self.path / "export")
        if self._world.is_main:
            (self.path / REQUEUE).unlink(missing_ok=True)
            draw_curves(self.path / METRICS, self.path / CURVES)
            print(report(self.path / METRICS), flush=True)
            self._close()
            print(f"finished: {results(self._config, self.scores)}", flush=True)

    def _restore_data(self, source: RolloutSource, extra: Mapping[str, Any]) -> None:
        """Restores the position in the prompts, and signals; other data, if allowed, start anew."""
        try:
            source.restore(extra["rollouts"])
            self.signals.restore(extra["signals"])
        except ValueError as error:
            if self._config.resume.changed != "allow":
                raise
            logger.warning("resume.changed = allow: the prompts start anew (%s)", first_line(error))

    def _open(self, start: ResumePoint) -> None:
        config = self._config
        wanted = config.logging
        self._archive(start)
        self._note_changes(start)
        # Of a run that was made longer: a folder with the figure is taken for one that has ended.
        (self.path / CURVES).unlink(missing_ok=True)
        replace_text(self.path / CONFIG, json.dumps(self._record, indent=2) + "\n")
        self._writers.append(partial(append_metrics, self.path / METRICS))
        if wanted.console:
            self._writers.append(ConsoleLine(config.trainer.steps, self._display.console))
        if wanted.trackers:
            earlier = read_metrics(self.path / METRICS) if start.step else []
            first = start.step + 1 if start.step else 0
            self._tracking = Tracking(self.path.resolve(), config, self._record, first, earlier)
            self._writers.append(self._tracking.log)

    def _close(self, *, failed: bool = False) -> None:
        """Ends the logs that do not write each line at once (rank 0)."""
        if self._tracking is not None:
            self._tracking.close(failed=failed)
            self._tracking = None

    def _archive(self, start: ResumePoint) -> None:
        """Archives what the run will overwrite: rows, and checkpoints later than the chosen one."""
        last = -1 if start.checkpoint is None else start.step
        for name in (METRICS, SAMPLES):
            if archive := archive_rows(self.path / name, last):
                logger.info("%s: rows from step %d on were moved to %s", name, last + 1, archive)
        if missing := missing_steps(self.path / METRICS, max(last, 0)):
            logger.warning(
                "%s lacks the rows of %d steps before the checkpoint (first: step %d): curves and"
                " tables will not have them; put the earlier file back to keep them",
                self.path / METRICS,
                len(missing),
                missing[0],
            )
        archive = self.path / f"{CHECKPOINTS}.overwritten"
        for path in later_steps(self.path / CHECKPOINTS, start.step):
            archive.mkdir(exist_ok=True)
            # Of a step that is overwritten for the second time the later one stays.
            shutil.rmtree(archive / path.name, ignore_errors=True)
            path.rename(archive / path.name)
            logger.info("checkpoint %s, of a later step, was moved to %s", path.name, archive)

    def _note_changes(self, start: ResumePoint) -> None:
        if not start.changes:
            return
        logger.warning(
            "resume.changed = allow: the run continues with other settings:%s",
            listed(start.changes),
        )
        with (self.path / "changes.jsonl").open("a", encoding="utf-8") as file:
            for change in start.changes:
                file.write(json.dumps({"step": start.step, **vars(change)}) + "\n")


def _sample(step: int, response: Response) -> dict[str, Any]:
    row = {
        "step": step,
        "prompt": response.prompt.uid,
        "prompt_text": response.prompt.text,
        "response": response.text,
        "answer": response.prompt.answer,
        "reward": response.score.reward,
        "correct": response.score.correct,
        "truncated": response.completion.truncated,
    }
    if response.score.problem is not None:
        row["problem"] = response.score.problem
    if facts := response.score.environment:
        row["turns"] = [passage._asdict() for passage in response.passages]
        ends = [name for name, is_so in facts.items() if name.startswith("ended_by/") and is_so]
        row["ended_by"] = ", ".join(ends).removeprefix("ended_by/")
    return row
