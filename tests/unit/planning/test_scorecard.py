"""tools/planning/scorecard.py: the page is what it prints, and its fit finds known shares."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_size import REPO
from tools.planning.published_runs import (
    KINDS,
    Row,
    Shares,
    lengths_of_mean,
    read_rows,
    read_run,
    write_models,
)
from tools.planning.scorecard import GRID, PUBLISHED, fit, lines

INPUTS: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text())
ROWS = [(kind, row) for kind in KINDS for row in INPUTS[kind]]


@pytest.mark.full
@pytest.mark.timeout(900)  # a minute on quiet cores
def test_the_page_is_what_the_command_prints() -> None:
    page = (REPO / "examples/planning/scorecard.md").read_text()
    command = "python tools/planning/scorecard.py"
    assert f"```bash\n{command}\n```" in page
    printed = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert f"```\n{printed.stdout}```" in page


@pytest.fixture(scope="module")
def few() -> list[Row]:
    """Two steps in turns on H100, a training and a weight sync."""
    dense = [
        row
        for row in INPUTS["steps"]
        if row["run"]["model"] in ("llama-8b", "qwen3-32b")
        and row["run"]["hardware"] == "H100"
        and "servers" not in row["run"]
    ]
    return read_rows(
        {
            **INPUTS,
            "steps": dense,
            "trainings": INPUTS["trainings"][:1],
            "syncs": INPUTS["syncs"][:1],
        }
    )


def test_the_fit_finds_the_shares_by_which_rows_were_made(few: list[Row]) -> None:
    truth = Shares(0.27, 0.41, 0.15)
    made = [replace(row, published=row.seconds(truth)) for row in few]
    found = fit(made)
    step = GRID[1] / GRID[0]
    for name in ("generation", "training", "sync"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=step - 1), name


def test_seconds_of_a_step_are_those_of_its_phases_over_their_shares(few: list[Row]) -> None:
    generation, training, sync = few[0].least
    assert min(few[0].least) > 0
    expected = generation / 0.5 + training / 0.25 + sync / 0.1
    assert few[0].seconds(Shares(0.5, 0.25, 0.1)) == pytest.approx(expected)


def test_a_row_is_left_out_of_the_fit_that_judges_it(few: list[Row]) -> None:
    """One step that took ten times as long: no other row can tell its ratio."""
    truth = Shares(0.3, 0.3, 0.2)
    made = [replace(row, published=row.seconds(truth)) for row in few]
    made[0] = replace(made[0], published=10 * made[0].published)
    every = [*made, *(replace(row, run=replace(row.run, hardware="GB200")) for row in made[:3])]
    text = next(each for each in lines(every) if "llama-8b" in each)
    assert float(text.split()[-1]) == pytest.approx(0.1, rel=0.03)
    assert float(text.split()[-2]) > 0.11


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_a_row_has_its_source(kind: str, row: dict[str, Any]) -> None:
    run = row["run"]
    assert run["source"] in INPUTS["sources"]
    assert run["hardware"] in INPUTS["hardware"] and run["model"] in INPUTS["models"]
    assert set(row["published"]) == ({"seconds"} if kind == "syncs" else {"mean", "seconds"})


@pytest.mark.full
def test_the_strict_configuration_takes_every_row(tmp_path: Path) -> None:
    write_models(INPUTS, tmp_path)
    runs = [read_run(kind, row, INPUTS, tmp_path) for kind, row in ROWS]
    assert {run.hardware for run in runs} == set(INPUTS["hardware"])
    assert {run.model for run in runs} == set(INPUTS["models"])


@pytest.mark.parametrize(("mean", "limit"), [(722, 1429), (3256, 3989), (8170, 40853)])
def test_lengths_have_the_published_mean(mean: int, limit: int) -> None:
    lengths = lengths_of_mean(mean, 2048, limit)
    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert lengths.max() <= limit
