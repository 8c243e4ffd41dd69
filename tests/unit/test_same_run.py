"""What the comparison of two commits says of their metrics."""

from __future__ import annotations

import importlib.util
import sys

from tests.test_size import REPO

BENCH = REPO / "tools/bench"
sys.path.insert(0, str(BENCH))  # it imports its neighbor
specification = importlib.util.spec_from_file_location("same_run", BENCH / "same_run.py")
same_run = importlib.util.module_from_spec(specification)
specification.loader.exec_module(same_run)
sys.path.remove(str(BENCH))

NAN = float("nan")
ROWS = [{"step": 1, "loss": 0.5, "kl": NAN, "time/step_s": 1.0}, {"step": 2, "loss": 0.25}]


def test_seconds_are_not_compared_and_nan_is_itself():
    other = [{**ROWS[0], "time/step_s": 2.0}, ROWS[1]]
    assert same_run.difference(ROWS, other) == "5 values of 3 metrics, all the same bits"


def test_the_largest_difference_and_what_only_one_has_are_named():
    other = [{"step": 1, "loss": 0.5, "new": 1.0}, {"step": 2, "loss": 0.24}]
    said = same_run.difference(ROWS, other)
    assert said.startswith("4 values of 2 metrics, 1 metrics differ, loss most: by 4.0e-02")
    assert said.endswith("; only before: kl; only now: new")


def test_a_metric_that_a_step_lacks_differs():
    said = same_run.difference(ROWS, [ROWS[0], {"step": 2}])
    assert "loss most: by inf" in said
