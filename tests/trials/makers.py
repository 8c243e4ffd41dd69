"""What several groups of cases share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials import looks
from tests.trials.material import toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import BUILT, Expected, Outcome, Refused

CODES = (1, 2)  # of commands that refuse: their own, or argparse's


def looked_at(outcome: Outcome, run_dir: Path, steps: int = 1) -> Outcome:
    """A run that ended well must have left what it promises; one that was refused, nothing."""
    if outcome.code == 0:
        return outcome.noting(looks.trained(run_dir, steps))
    if outcome.code is None:
        return outcome
    began = BUILT["policy"].search(outcome.text) is not None
    return outcome.noting(looks.not_trained(run_dir, began=began))


def tool(
    name: str,
    title: str,
    words: Callable[[Place], Sequence[object]],
    *expected: Expected,
    limit_s: float = 90,
    needs: tuple[str, ...] = (),
) -> Case:
    """A command of Python; ``words`` follow the interpreter."""

    def play(place: Place) -> Outcome:
        return place.command([sys.executable, *words(place)])

    return Case(name, "journeys", title, play, expected, "command", limit_s, needs=needs)


def refused(*says: str) -> Refused:
    """What a command of this repository does with wrong words."""
    return Refused(says, before="", codes=CODES)


def finished_run(place: Place, *more: str, name: str = "journey") -> Path:
    """A finished run of two steps, made once, for commands that only read it."""

    def train(path: Path) -> None:
        two_steps = ("trainer.num_steps=2", "checkpoint.every_steps=1")
        outcome = place.train(toy_alone(place.material, path, *two_steps, *more))
        assert outcome.code == 0, outcome.text[-1500:]

    return place.material.made(f"runs/{name}", train)
