"""The rows of tests/refusals that are no mistakes: each trains one step with both engines."""

from __future__ import annotations

from collections.abc import Callable

from tests.refusals.inputs import Row, words_of
from tests.refusals.tables import TABLES
from tests.trials.looks import looked_at
from tests.trials.place import Case, Place, torchrun
from tests.trials.verdicts import Ends, Outcome


def one_step(table: str, row: Row) -> Callable[[Place], Outcome]:
    def play(place: Place) -> Outcome:
        folder = place.folder / "input"
        words = words_of(table, row, folder, place.material)
        start = place.command(torchrun(2, words)) if table == "ranks" else place.train(words)
        return looked_at(start, folder / "run")

    return play


def cases() -> list[Case]:
    return [
        Case(name, "passing", row["title"], one_step(table, row), (Ends(),), "warm")
        for table, rows in TABLES.items()
        for name, row in rows.items()
        if "reaches" in row
    ]
