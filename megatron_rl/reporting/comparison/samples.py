"""A few responses of a run: of its first and last logged step, a right and a wrong one each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.reporting.comparison.runs import SAMPLES, Run

_MAX_CHARACTERS = 2000


@dataclass(frozen=True)
class Sample:
    """A response as it was logged; long texts are cut, and say so."""

    step: int
    correct: bool
    prompt: str
    response: str
    answer: str
    reward: str
    truncated: bool


def samples_of(run: Run) -> tuple[list[Sample], list[str]]:
    """The samples, and what is wrong with the file: lines that are no sample are left out."""
    first: dict[bool, Mapping[str, Any]] = {}
    last: dict[bool, Mapping[str, Any]] = {}
    damaged: list[int] = []
    first_step = None
    last_step = None
    for line_number, row in _rows(run):
        if row is None:
            damaged.append(line_number)
            continue
        # Rows come in the order of the steps: whatever step is the newest may be the last, so what
        # was kept of the one before is dropped. One pass, of a file that may be larger than memory.
        if first_step is None:
            first_step = row["step"]
        if row["step"] != last_step:
            last_step = row["step"]
            last = {}
        correct = bool(row["correct"])
        last.setdefault(correct, row)
        if row["step"] == first_step:
            first.setdefault(correct, row)
    samples = []
    for of_step in (first, last) if last_step != first_step else (first,):
        for correct in (True, False):
            if correct in of_step:
                samples.append(_sample(of_step[correct]))
    problems = []
    if damaged:
        problems.append(
            f"{SAMPLES}: {len(damaged)} lines are damaged and left out, the first is line "
            f"{damaged[0]}"
        )
    return samples, problems


def _rows(run: Run) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """(number of the line, its row); None for what is no sample. A last line that a kill cut off is
    left out."""
    path = run.path(SAMPLES)
    if not path.is_file():
        return
    # Only a newline ends a line, as in ``row_file``: responses are untrusted text.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    yield number, None
                continue
            has_step = isinstance(row, dict) and isinstance(row.get("step"), int)
            is_sample = has_step and "response" in row and "correct" in row
            yield number, row if is_sample else None


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        step=row["step"],
        correct=bool(row["correct"]),
        prompt=_cut(row.get("prompt_text")),
        response=_cut(row["response"]),
        answer=_cut(row.get("answer")),
        reward=_cut(row.get("reward")),
        truncated=bool(row.get("truncated")),
    )


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    left = len(text) - _MAX_CHARACTERS
    if left <= 0:
        return text
    return f"{text[:_MAX_CHARACTERS]}\n[... {left} more characters in {SAMPLES}]"
