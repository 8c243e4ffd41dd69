"""Messages that may be lost: the same mistake on 2, 4 and 8 ranks, several starts each."""

from __future__ import annotations

from collections.abc import Callable

from tests.trials.place import Case, Place
from tests.trials.starts import LIMIT_S, MISTAKES, Mistake, load, started
from tests.trials.verdicts import WEIGHT, Outcome, Refused

STARTS = 5


def several(mistake: Mistake, ranks: int, busy: int) -> Callable[[Place], Outcome]:
    """The worst of five starts."""

    def play(place: Place) -> Outcome:
        results = []
        with load(busy):
            for number in range(STARTS):
                results.append(
                    started(place.material, place.folder / f"start_{number}", mistake, ranks)
                )
        worst, outcome = max(results, key=lambda result: WEIGHT[result[0].name])
        bad = sum(verdict.name == "bad" for verdict, _ in results)
        return outcome.noting([f"{bad} of {STARTS} starts"] if worst.name == "bad" else [])

    return play


def cases() -> list[Case]:
    """Five cases of five starts."""
    typo, shape = MISTAKES[0], MISTAKES[-1]
    assert shape.one_rank_alone
    plan = {
        "lost_typo": (typo, 2, 0),
        "lost_typo_load": (typo, 2, 4),
        "lost_typo_4": (typo, 4, 0),
        "lost_typo_8": (typo, 8, 0),
        "lost_pp2_shape": (shape, 2, 0),
    }
    return [
        Case(
            name,
            "lost",
            f"{mistake.name}, {ranks} ranks, {STARTS} starts" + (", loaded" if busy else ""),
            several(mistake, ranks, busy),
            (Refused(mistake.says, before="", within_s=LIMIT_S),),
            f"torchrun {ranks}",
        )
        for name, (mistake, ranks, busy) in plan.items()
    ]
