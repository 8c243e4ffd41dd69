"""What users do wrong, as a table: each row is refused before anything is built that takes long,
by one message that names what is wrong and what to do; or it is no mistake and passes."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.ranks import call
from tests.refusals.tables import TABLES
from tests.trials.verdicts import Outcome, Refused, judge

RANKS = {"config": 1, "data": 1, "model": 1, "ranks": 2}
# Weights are read, and refused, by the policy itself.
UNTIL = {"config": "policy", "data": "policy", "model": "engine", "ranks": "policy"}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]


class Start(NamedTuple):
    """``reached``: the part that would have been built next; empty where the start was refused."""

    text: str
    reached: str
    seconds: float


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Gives what the starts of a row came to, one a rank; a table is played when it is needed."""
    found = {}

    def played(table, name):
        if table not in found:
            found[table] = []  # not again where the call fails
            # By name: torch, megatron and vllm are imported by the ranks alone.
            play = (table, TABLES[table], tmp_path_factory.mktemp(table), UNTIL[table])
            found[table] = call(RANKS[table], "tests.refusals.player:play", *play, timeout=280)
        return [Start(*rank[name]) for rank in found[table]]

    return played


@pytest.mark.parametrize(("table", "name"), ROWS, ids=[name for _, name in ROWS])
def test_a_mistake_is_one_early_clear_message(played, table, name):
    row = TABLES[table][name]
    starts = played(table, name)
    assert starts, "the first row of this table says why it was not played"
    for start in starts:
        assert start.reached == row.get("reaches", ""), start.text
        if "reaches" not in row:
            outcome = Outcome(1, start.text, start.seconds)
            verdict = judge([Refused(tuple(row["says"]), before="")], outcome)
            assert verdict.name == "good", f"{verdict.reasons}\n{start.text}"
    for says in row.get("says", ()):
        assert re.search(says, starts[0].text, re.IGNORECASE | re.DOTALL), says
