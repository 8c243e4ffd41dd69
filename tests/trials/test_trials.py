"""The trials as tests: hours on two cores, so in the full tier alone."""

from __future__ import annotations

import pytest

from tests.trials import kills, starts
from tests.trials.groups import NAMES
from tests.trials.record import table
from tests.trials.run import chosen, passed, run

HOUR = 3600


@pytest.mark.full
@pytest.mark.timeout(HOUR)
@pytest.mark.parametrize("group", NAMES)
def test_trials(group, tmp_path):
    rows = run(chosen([group], []), tmp_path, jobs=2)
    assert passed(rows), "\n" + table(rows)


@pytest.mark.full
@pytest.mark.timeout(HOUR)
@pytest.mark.parametrize("turns", [False, True])
def test_twenty_kills_leave_twenty_equal_ends(tmp_path, turns):
    found = kills.campaign(20, 1, tmp_path, turns=turns)
    assert not [kill.line() for kill in found if kill.found]


@pytest.mark.full
@pytest.mark.timeout(3 * HOUR)
def test_no_message_is_lost_in_a_hundred_starts(tmp_path):
    found = starts.campaign(100, 1, tmp_path, busy=2)
    assert not [start.line() for start in found if start.verdict.name != "good"]
