"""A few responses of a run: of its first and last logged step, a right and a wrong one each."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.run.files import SAMPLES
from tools.reporting.runs import Run

_MAX_CHARACTERS = 2000

Sample = Mapping[str, Any]  # a line of samples.jsonl


def samples_of(run: Run) -> tuple[list[Sample], list[str]]:
    """The samples, and what is wrong with the file: lines that are no sample are left out."""
    path = run.folder / SAMPLES
    if not path.is_file():
        return [], []
    first: dict[bool, Sample] = {}
    last: dict[bool, Sample] = {}
    first_step = last_step = None
    damaged: list[int] = []
    # Only a newline ends a line, as in ``metrics_file``: responses are untrusted text.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            row = as_sample(line)
            if row is None:
                # A last line that a kill cut off is no damage.
                damaged += [number] if line.endswith("\n") else []
                continue
            # Rows come in the order of the steps: whatever step is the newest may be the last, so
            # what was kept of the one before is dropped. One pass: the file may exceed the memory.
            if first_step is None:
                first_step = row["step"]
            if row["step"] != last_step:
                last_step = row["step"]
                last = {}
            last.setdefault(bool(row["correct"]), row)
            if row["step"] == first_step:
                first.setdefault(bool(row["correct"]), row)
    found = []
    for of_step in (first, last) if last_step != first_step else (first,):
        found += [of_step[correct] for correct in (True, False) if correct in of_step]
    problems = []
    if damaged:
        count = len(damaged)
        problems.append(f"{SAMPLES}: {count} lines are damaged, the first is line {damaged[0]}")
    return found, problems


def as_sample(line: str) -> Sample | None:
    """None where the line is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    has_step = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if has_step and "response" in row and "correct" in row else None


def passages_of(sample: Sample) -> Iterator[tuple[str, str, str]]:
    """Title, kind (prompt, sampled, appended or answer) and text of each part of a conversation."""
    yield "Prompt", "prompt", shortened_text(sample.get("prompt_text"))
    turns = sample.get("turns") or [{"is_sampled": True, "text": sample["response"]}]
    number = 0
    for turn in turns:
        number += turn["is_sampled"]
        title = f"Turn {number}" if turn["is_sampled"] else "Appended"
        kind = "sampled" if turn["is_sampled"] else "appended"
        yield title if len(turns) > 1 else "Response", kind, shortened_text(turn["text"])
    yield "Right answer", "answer", shortened_text(sample.get("answer"))


def shortened_text(value: Any) -> str:
    """A value of a sample as text; a long one is cut, and says so."""
    text = value if isinstance(value, str) else json.dumps(value)
    left = len(text) - _MAX_CHARACTERS
    if left <= 0:
        return text
    return f"{text[:_MAX_CHARACTERS]}\n[... {left} more characters in {SAMPLES}]"
