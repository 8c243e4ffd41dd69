"""Checkpoints converted from one format to another."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.launch import REPO
from tests.trials import looks
from tests.trials.machine_cases import filled
from tests.trials.makers import finished_run, refused
from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome

CONVERT = REPO / "tools" / "convert_checkpoint.py"


def round_trip(kind: str, family: str) -> Callable[[Place], Outcome]:
    """HF to ``kind`` and back: the weights are equal, bit for bit."""

    def play(place: Place) -> Outcome:
        source = place.material.model(family)
        middle, target = place.folder / "middle", place.folder / "hf"
        first = place.command([sys.executable, CONVERT, f"to-{kind}", source, middle])
        if first.code != 0:
            return first
        second = place.command([sys.executable, CONVERT, "to-hf", middle, target])
        return second.noting(looks.same_weights(source, target) if second.code == 0 else [])

    return play


def trip(kind: str, family: str) -> Case:
    return Case(
        f"jrn_{kind}_{family}",
        "journeys",
        f"{family} to {kind} and back",
        round_trip(kind, family),
        (Ends(),),
        "command",
        150,
    )


def of_training(place: Place) -> Outcome:
    """A training checkpoint becomes a HF directory equal to the export."""
    run_dir = finished_run(place)
    target = place.folder / "hf"
    words = [sys.executable, CONVERT, "to-hf", run_dir / "checkpoints" / "step_000002", target]
    outcome = place.command([*words, "--config", place.material.model("toy")])
    if outcome.code != 0:
        return outcome
    return outcome.noting(looks.same_weights(run_dir / "export", target))


def full_target(place: Place) -> Outcome:
    with place.mounted(place.folder / "disk", 1) as disk:
        filled(place, disk)
        words = [CONVERT, "to-megatron", place.material.model("llama"), disk / "out"]
        return place.command([sys.executable, *words])


def cases() -> list[Case]:
    families = ("llama", "qwen2", "mixtral")
    return [
        *(trip("megatron", family) for family in families),
        *(trip("nemo", family) for family in families),
        Case(
            "jrn_hf_training",
            "journeys",
            "a training checkpoint to HF",
            of_training,
            (Ends(),),
            "command",
        ),
        Case(
            "jrn_convert_full",
            "journeys",
            "a target without room",
            full_target,
            (refused("no space|room|full|out"),),
            "command",
            needs=("root",),
        ),
    ]
