"""The folder of an evaluation, touched by rank 0 alone.

``config.json`` (settings, as a run has it), ``responses/step_NNNNNN.parquet``, ``metrics.jsonl``
(one row a step); ``.lock``, held while an evaluation is at work.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoints.directory import PARTIAL
from megatron_rl.evaluation.evaluation_source import Weights, differences
from megatron_rl.reporting.answer_file import AnswerFile, steps_there
from megatron_rl.reporting.evaluation import detailed_metrics
from megatron_rl.reporting.row_file import replace_text
from megatron_rl.reporting.sinks import Metrics, MetricsFile
from megatron_rl.run.run_record import listed, read_record
from megatron_rl.run.start import CONFIG, METRICS
from megatron_rl.runtime import disk
from megatron_rl.runtime.guard import lock

RESPONSES = "responses"
PROMPTS = "prompts"  # of config.json: their fingerprint
logger = logging.getLogger(__name__)


class EvaluationFolder:
    """The folder of an evaluation, on rank 0.

    Attributes:
        pass_at: the k of pass@k, computed from all responses that are there.
    """

    def __init__(self, path: Path, pass_at: Sequence[int]) -> None:
        self.path = path
        self.pass_at = pass_at
        self._rows: dict[int, Metrics] = {}

    def prepare(
        self, record: Mapping[str, Any], weights: Sequence[Weights], launch_id: str
    ) -> list[set[str]]:
        """Takes the folder for this launch; the uids of the prompts that each of ``weights`` has
        answered already.

        Raises:
            ValueError: it cannot be written, is in use, holds something else than an evaluation,
                one with other settings, or answers of other weights of the same step.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.hold(self.path, launch_id)
        except OSError as error:
            raise ValueError(
                f"--out {self.path}: cannot be written ({error.strerror}: {error.filename}); give a"
                " folder to write into"
            ) from None
        self._refuse_other(record)
        answered = []
        for each in weights:
            file = self.file(each)
            file.check()
            if file.is_whole:
                logger.info("step %d: all its prompts are answered in %s", each.step, file.path)
            answered.append(file.answered())
        with disk.room_for(self.path, 0, "the settings"):
            replace_text(self.path / CONFIG, json.dumps(record, indent=2) + "\n")
        return answered

    def file(self, weights: Weights) -> AnswerFile:
        """The responses of one step."""
        return AnswerFile(self.path / RESPONSES, weights.step, weights.fingerprint)

    def write_metrics(self) -> list[Metrics]:
        """``metrics.jsonl`` of every step whose responses are there; returns its rows."""
        folder = self.path / RESPONSES
        for step, fingerprint in steps_there(folder).items():
            if step not in self._rows:
                judged = AnswerFile(folder, step, fingerprint).judged()
                self._rows[step] = {"step": step, **detailed_metrics(judged, self.pass_at)}
        rows = [self._rows[step] for step in sorted(self._rows)]
        with disk.room_for(self.path, 0, "the metrics"):
            partial = self.path / f"{METRICS}{PARTIAL}"
            partial.unlink(missing_ok=True)
            write = MetricsFile(partial)
            for row in rows:
                write(row)
            partial.replace(self.path / METRICS)
        return rows

    def _refuse_other(self, record: Mapping[str, Any]) -> None:
        old = read_record(self.path / CONFIG)
        if old is None and not (self.path / METRICS).exists():
            return
        if old is None or PROMPTS not in old:
            raise ValueError(
                f"--out {self.path}: holds something else than an evaluation ({CONFIG} or {METRICS}"
                " of a run); give another folder"
            )
        changes = differences(old, record)
        if changes:
            raise ValueError(
                f"--out {self.path}: holds an evaluation with other settings:{listed(changes)}\nset"
                " these as they were, or give another --out"
            )
