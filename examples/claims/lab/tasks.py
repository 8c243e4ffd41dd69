"""The tasks of the claims: prompts, demonstrations, and what is right.

Kinds, by the first word of the prompt. ``sum`` is shown right more often than not; ``diff``
rarely, so that a group of eight often has no right response; ``pick`` has several right answers, of
which one is shown more often than the others; ``gap``, of the lab that decides, so rarely that 64
responses often have no right one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 29  # of a sum or a difference
SHARES = {"sum": 0.6, "pick": 0.35, "diff": 0.12, "gap": 0.08}  # of right demonstrations
# Prompts of each kind, in the labs of sampled and of exact answers.
HELD_OUT = {"sum": 32, "pick": 32, "diff": 32}
HELD_OUT_EXACT = {"sum": 160, "pick": 34, "diff": 110, "gap": 80}
FAVORITE = 0.7  # share of the favorite among the right demonstrations of ``pick``
STOP = "."  # behind an answer, in the lab of exact answers: its format
STOPPED = 0.8  # share of demonstrations with it
MOST_DOTS = 16  # before an answer; every number up to it is shown as often


def prompts(kinds: Collection[str] = HELD_OUT) -> list[str]:
    """Every prompt of ``kinds``."""
    numbers = range(LARGEST + 1)
    sums = [f"sum {a} {b}" for a in numbers for b in numbers]
    differences = [f"diff {a} {b}" for a in numbers for b in numbers if a >= b]
    picks = [f"pick {total} not {digit}" for total in range(3, 16) for digit in range(10)]
    gaps = [f"gap {a} {b}" for a in numbers for b in numbers if a < b]
    every = [*sums, *differences, *(text for text in picks if right_answers(text)), *gaps]
    return [text for text in every if text.split()[0] in kinds]


def right_answers(prompt: str) -> list[str]:
    """All that are right; the favorite first."""
    kind, first, *rest = prompt.split()
    number = int(first)
    last = int(rest[-1])
    if kind == "sum":
        return [str(number + last)]
    if kind in ("diff", "gap"):
        return [str(abs(number - last))]
    return [
        f"{digit} {number - digit}"
        for digit in range(10)
        if 0 <= number - digit <= 9 and last not in (digit, number - digit)
    ]


def demonstration(kind: str, right: Sequence[str], rng: random.Random) -> str:
    """An answer as the starting model is shown it: right by the share of its kind, else off by one
    or two; of ``gap``, whose right answers are not to lie amid wrong ones, five to eight more."""
    favorite, *others = right
    if rng.random() < SHARES[kind]:
        return favorite if not others or rng.random() < FAVORITE else rng.choice(others)
    slip = rng.choice((5, 6, 7, 8) if kind == "gap" else (-2, -1, 1, 2))
    if kind != "pick":
        return str(int(favorite) + slip)
    digit, other = favorite.split()
    return f"{digit} {int(other) + slip}"


def thought_about(answer: str, rng: random.Random) -> str:
    """The answer after some dots."""
    return "." * rng.randint(0, MOST_DOTS) + answer


def stopped(answer: str, rng: random.Random) -> str:
    """The answer, mostly with its full stop."""
    return answer + STOP * (rng.random() < STOPPED)


def score(tasks: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """The reward: 1 for a right answer, with dots before or behind it or without, else 0."""
    return [
        float(response.strip(". ") in task.extra["right"])
        for task, response in zip(tasks, responses, strict=True)
    ]


def graded(tasks: Sequence[Any], responses: Sequence[str]) -> list[float]:
    """0.9 for a right answer and 0.1 for a full stop, as MAPO and Durian weigh their format."""
    stops = [response.endswith(STOP) for response in responses]
    return [
        round(0.9 * right + 0.1 * stop, 9)
        for right, stop in zip(score(tasks, responses), stops, strict=True)
    ]


def row(prompt: str) -> dict[str, Any]:
    right = right_answers(prompt)
    kind = prompt.split()[0]
    return {"prompt": prompt, "answer": right[0], "data_source": kind, "extra": {"right": right}}


def write(folder: Path, held_out: Mapping[str, int] = HELD_OUT) -> None:
    """``train.jsonl``, and ``eval.jsonl`` with so many prompts of each kind."""
    rng = random.Random(0)
    kinds: dict[str, list[str]] = {kind: [] for kind in held_out}
    for prompt in prompts(held_out):
        kinds[prompt.split()[0]].append(prompt)
    train: list[str] = []
    test: list[str] = []
    for kind, of_kind in kinds.items():
        rng.shuffle(of_kind)
        test += of_kind[: held_out[kind]]
        train += of_kind[held_out[kind] :]
    _write_rows(folder / "train.jsonl", train)
    _write_rows(folder / "eval.jsonl", test)


def _write_rows(file: Path, chosen: Sequence[str]) -> None:
    text = "".join(json.dumps(row(prompt)) + "\n" for prompt in chosen)
    file.write_text(text, encoding="ascii")
