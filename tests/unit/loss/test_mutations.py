"""Bugs planted in the formulas are noticed by the hand-worked tests (tools/mutate_loss.py)."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tools.loss_mutations import MUTATIONS
from tools.mutate_loss import changed

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(warm.python()), "tools/mutate_loss.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_sample_of_planted_bugs_is_noticed() -> None:
    result = run("--sample", "30")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "30 of 30 bugs noticed" in result.stdout


@pytest.mark.full
def test_every_planted_bug_is_noticed() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_planted_bug_has_one_place_in_the_code() -> None:
    for mutation in MUTATIONS:
        changed(mutation)  # a ValueError where the text that it replaces is not there just once


def test_every_formula_has_three_planted_bugs() -> None:
    formulas = {mutation.formula for mutation in MUTATIONS}
    assert all(
        sum(mutation.formula == formula for mutation in MUTATIONS) >= 3 for formula in formulas
    )
