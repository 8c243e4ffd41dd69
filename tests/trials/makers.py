"""Short forms of the cases that differ in overrides alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.trials import looks
from tests.trials.material import small, toy, toy_alone
from tests.trials.place import Case, Place
from tests.trials.verdicts import BUILT, Ends, Expected, Outcome, Refused

CODES = (1, 2)  # of commands that refuse: their own, or argparse's
Change = Sequence[str] | Callable[[Place], Sequence[str]]


def settled(change: Change, place: Place) -> list[str]:
    return list(change(place) if callable(change) else change)


def toy_case(
    name: str,
    title: str,
    change: Change,
    *expected: Expected,
    group: str = "config",
    nproc: int = 2,
    steps: int = 1,
) -> Case:
    """``change`` on top of the toy's overrides, by torchrun."""

    def play(place: Place) -> Outcome:
        run_dir = place.folder / "run"
        outcome = place.torchrun(toy(place.material, run_dir, *settled(change, place)), nproc)
        return looked_at(outcome, run_dir, steps)

    return Case(name, group, title, play, expected, f"torchrun {nproc}")


def looked_at(outcome: Outcome, run_dir: Path, steps: int = 1) -> Outcome:
    """A run that ended well must have left what it promises; one that was refused, nothing."""
    if outcome.code == 0:
        return outcome.noting(looks.trained(run_dir, steps))
    if outcome.code is None:
        return outcome
    began = BUILT["policy"].search(outcome.text) is not None
    return outcome.noting(looks.not_trained(run_dir, began=began))


def refused_toy(
    name: str,
    title: str,
    change: Change,
    *says: str,
    harm: bool = True,
    codes: tuple[int, ...] = (1,),
    nproc: int = 2,
    warns: tuple[str, ...] = (),
) -> Case:
    """Refused before the policy is built. ``warns``: or trained, with that warning."""
    also = (Ends(warns),) if warns else ()
    return toy_case(name, title, change, Refused(says, harm, codes=codes), *also, nproc=nproc)


def warm_case(
    name: str,
    title: str,
    make: Callable[[Place], tuple[Path, Path]],
    *expected: Expected,
    group: str,
    more: Sequence[str] = (),
    steps: int = 1,
) -> Case:
    """One step on the model and the data that ``make`` writes, by the warm server."""

    def play(place: Place) -> Outcome:
        model, data = make(place)
        run_dir = place.folder / "run"
        overrides = [item.replace("{folder}", str(place.folder)) for item in more]
        return looked_at(place.warm(small(model, data, run_dir, *overrides)), run_dir, steps)

    return Case(name, group, title, play, expected, "warm")


def data_case(
    name: str,
    title: str,
    write: Callable[[Path], object] | None,
    *expected: Expected,
    file: str = "data.jsonl",
    more: Sequence[str] = (),
) -> Case:
    """``write`` makes the data file (None: it does not exist); the model is a Llama."""

    def make(place: Place) -> tuple[Path, Path]:
        path = place.folder / file
        if write is not None:
            write(path)
        return place.material.model("llama"), path

    return warm_case(name, title, make, *expected, group="data", more=more)


def model_case(
    name: str,
    title: str,
    spoil: Callable[[Path], object],
    *expected: Expected,
    family: str = "llama",
    more: Sequence[str] = (),
) -> Case:
    """``spoil`` changes a copy of the model; the data are plain sums."""

    def make(place: Place) -> tuple[Path, Path]:
        model = place.material.copy_of(family, place.folder / "model")
        spoil(model)
        return model, place.material.rows()

    return warm_case(name, title, make, *expected, group="model", more=more)


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
        outcome = place.warm(toy_alone(place.material, path, *two_steps, *more))
        assert outcome.code == 0, outcome.text[-1500:]

    return place.material.made(f"runs/{name}", train)
