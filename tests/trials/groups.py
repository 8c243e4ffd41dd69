"""All cases, by group."""

from __future__ import annotations

from collections import Counter

from tests.trials import fault_cases, journey_cases, machine_cases, passing_cases, user_cases
from tests.trials.place import Case

NAMES = ("passing", "faults", "users", "journeys")
ALONE = ("faults", "users")  # these load the machine, or look at moments of a run
MODULES = (passing_cases, fault_cases, machine_cases, user_cases, journey_cases)


def all_cases() -> list[Case]:
    """Every case, in the order of the groups. Names are unique."""
    found = [case for module in MODULES for case in module.cases()]
    twice = [name for name, count in Counter(case.name for case in found).items() if count > 1]
    assert not twice, f"names given twice: {twice}"
    unknown = {case.group for case in found} - set(NAMES)
    assert not unknown, f"unknown groups: {unknown}"
    return found
