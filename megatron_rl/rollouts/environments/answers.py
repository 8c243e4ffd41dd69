"""Answers of environments on disk: a run that was killed gives its responses the same ones again.

An environment should be a function of its seeds and turns, but a search engine or another service
is not. So answers in a training step are appended to ``run_dir/environment`` before a token is
sampled after them. Where the step is repeated after a kill, the same turns are sampled, and their
answers are read from disk. Problems are not kept: they may be fixed by then.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

FOLDER = "environment"
Reply = dict[str, Any]  # of ``worker.Episodes.verify``


def answer_key(uid: str, seed: int, turns: Sequence[str]) -> str:
    """Key of an answer in its step. ``seed``: of the environment; ``turns``: all texts so far."""
    return hashlib.blake2b(json.dumps([uid, seed, turns]).encode(), digest_size=16).hexdigest()


class RecordedAnswers:
    """Answers that this process has got, and those of earlier starts of the run."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        """``num_steps``: one more than a run that resumes may go back."""
        self._folder = folder
        self._num_steps = num_steps
        self._name = f"{uuid4().hex}.jsonl"  # no other process has it
        self._known: dict[int, dict[str, Reply]] = {}  # by step

    def of_step(self, step: int) -> dict[str, Reply]:
        """Answers by key; only ``add`` may change them."""
        if step not in self._known:
            self._known[step] = found = {}
            for path in sorted(self._folder.glob(f"step_{step:06d}.*")):
                # The last line of a process that was killed may be half of one.
                lines = path.read_text("utf-8").splitlines(keepends=True)
                found |= dict(json.loads(line) for line in lines if line.endswith("\n"))
            self._drop(step - self._num_steps)
        return self._known[step]

    def add(self, step: int, key: str, reply: Reply) -> None:
        if reply.get("problem") is None:
            self.of_step(step)[key] = reply
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"step_{step:06d}.{self._name}").open(
                "a", encoding="utf-8"
            ) as file:
                file.write(json.dumps([key, reply]) + "\n")

    def _drop(self, step: int) -> None:
        """Drops the answers up to ``step``, which no resumed run asks for."""
        self._known = {one: answers for one, answers in self._known.items() if one > step}
        for path in self._folder.glob("step_*"):
            if int(path.name.split(".")[0].removeprefix("step_")) <= step:
                path.unlink(missing_ok=True)
