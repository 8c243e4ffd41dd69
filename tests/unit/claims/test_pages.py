"""Pages, tables and figures of claims say what their data say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tools.claim_checks import Claim, outcomes, read_claim
from tools.claim_page import band_of_seeds, page, spread, unit
from tools.claims import (
    CLAIMS,
    REPO,
    by_cell,
    collect,
    name_of,
    plan,
    read_data,
    table,
    wall_seconds,
    write_page,
)
from tools.reporting.figures import draw_bands

FOLDERS = sorted(file.parent for file in CLAIMS.rglob("data.jsonl"))
NAMES = [name_of(folder) for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_the_page_says_what_the_data_say(folder: Path) -> None:
    claim = read_claim(folder)
    rows = read_data(folder)
    of_cells = by_cell(rows)
    assert {cell: len(seeds) for cell, seeds in of_cells.items()} == dict.fromkeys(
        claim.cells, claim.num_seeds
    )
    found = outcomes(claim.checks, of_cells)
    written = (folder / "README.md").read_text("utf-8")
    assert written == page(claim, name_of(folder), rows, of_cells, found)


def test_the_tables_of_claims_are_up_to_date() -> None:
    rows = table().splitlines()[2:]
    assert len(rows) == len(FOLDERS) + 3  # a sum of each lab, and of both
    num_checks = sum(len(read_claim(folder).checks) for folder in FOLDERS)
    assert rows[-1].startswith(f"| all of them | | {num_checks} checks: ")
    assert table() in (CLAIMS / "README.md").read_text("utf-8")
    counts = rows[-1].split("|")[3].strip()
    assert counts in (REPO / "README.md").read_text("utf-8")


def write_run(folder: Path, values: dict[str, float]) -> None:
    folder.mkdir(parents=True)
    rows = [{"step": 0}, {"step": 1, "time/step_s": 1.6, **values}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="ascii")
    (folder / "config.json").write_text('{"git_commit": "abc"}', encoding="ascii")


def test_data_have_what_is_compared_and_pass_at_k_with_room_above(tmp_path: Path) -> None:
    checks = [{"metric": "eval/pass_at_1", "more": "b", "less": "a"}]
    claim = Claim.model_validate(
        {
            **dict.fromkeys(("title", "source", "says", "expected"), "nothing"),
            "cells": {"a": ["x=1"], "b": ["x=2"]},
            "differ": ["x"],
            "num_seeds": 2,
            "checks": checks,
            "curves": ["rollout/entropy"],
        }
    )
    values = {"eval/pass_at_1": 0.25, "eval/pass_at_2": 0.5, "rollout/entropy": 1.0}
    for cell in ("x_1", "x_2"):
        write_run(tmp_path / cell / "seed-1", values)
        write_run(tmp_path / cell / "seed-2", {**values, "eval/pass_at_8": 0.75})
    first, second, *_ = collect(claim, tmp_path)
    assert first == {
        "cell": "a",
        "seed": 1,
        "seconds": 2,
        "commit": "abc",
        "metrics": {"eval/pass_at_1": {1: 0.25}, "rollout/entropy": {5: 1.0}},
    }
    assert second["metrics"]["eval/pass_at_8"] == {1: 0.75}
    write_run(tmp_path / "x_1" / "seed-3", {"eval/pass_at_1": 0.25})
    with pytest.raises(ValueError, match="has no rollout/entropy"):
        collect(claim.model_copy(update={"num_seeds": 3}), tmp_path)


def test_a_page_is_made_of_its_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(FOLDERS[0] / "claim.yaml", folder)
    claim = read_claim(folder)
    rows = [
        {
            "cell": cell,
            "seed": seed,
            "seconds": 60,
            "commit": "abcdef0123",
            "metrics": {
                metric: {"0": 0.1, "20": 0.2, "110": 0.2 + seed / 10} for metric in claim.metrics
            },
        }
        for cell in claim.cells
        for seed in (1, 2)
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="ascii")
    assert "undecided" in write_page(folder)
    text = (folder / "README.md").read_text("utf-8")
    assert f"{len(rows)} runs, {len(rows)} minutes of training in all, at commit abcdef01" in text
    (folder / "data.jsonl").write_text(
        "\n".join(json.dumps({**row, "wall_seconds": 120}) for row in rows), encoding="ascii"
    )
    write_page(folder)
    wall = f"in all ({2 * len(rows)} from start to end of each run, evaluations among it), at"
    assert wall in (folder / "README.md").read_text("utf-8")
    assert (folder / "curves.png").stat().st_size > 10_000


def made_rows(cells: int, seeds: int) -> list[dict]:
    metrics = {"m": {"0": 0.1, "20": 0.2}}
    pairs = [(f"cell{cell}", seed) for cell in range(cells) for seed in range(seeds)]
    return [{"cell": cell, "seed": seed, "metrics": metrics} for cell, seed in pairs]


@pytest.mark.parametrize(
    ("cells", "seeds", "words"),
    [
        (2, 5, "median over the seeds and their range as a band, each run as a thin line"),
        (4, 5, "median over the seeds and their range as a band"),
        (5, 2, "median over the seeds, each run as a thin line"),
        (5, 5, "median over the seeds"),
    ],
)
def test_the_page_says_what_the_figure_shows(cells, seeds, words) -> None:
    drawn = by_cell(made_rows(cells, seeds))
    assert spread(drawn) == words
    axes = Figure().subplots()
    bands = [band_of_seeds(of_seeds, "m") for of_seeds in drawn.values()]
    draw_bands(axes, bands, held_out=True)
    assert bool(axes.collections) == ("band" in words)
    thin = [line for line in axes.lines if line.get_linewidth() < 1]
    assert len(thin) == (cells * seeds if "thin" in words else 0)


def test_a_plan_has_the_spread_and_the_seeds(tmp_path: Path) -> None:
    """Differences 0.01, 0.02 and 0.03, each the mean of two evaluations: deviation 0.01. Margin
    0.0075: (t(0.95) + t(0.9)) 0.01 / sqrt(n) is 0.00748 of 17 seeds and 0.00773 of 16."""
    rows = [
        {"cell": cell, "seed": seed, "metrics": {"eval/pass_at_1": {"80": value, "120": value}}}
        for seed in (1, 2, 3)
        for cell, value in (("a", 0.2 + seed / 100), ("b", 0.2))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="ascii")
    lines = plan(tmp_path).splitlines()
    assert lines[0] == "eval/pass_at_1: standard deviation 0.0100, sampled nan"
    assert "mapo: 17 seeds for 1 of 3 checks" in lines


def test_every_curve_has_a_unit() -> None:
    assert unit("eval/pass_at_64") == "share of prompts"
    assert unit("rollout/entropy") == "nats"
    assert unit("eval/accuracy/pick") == "share of responses"
    assert unit("credit/length_gap_tokens") == "tokens"
    for folder in FOLDERS:
        assert all(unit(metric) for metric in read_claim(folder).curves)
    with pytest.raises(ValueError, match="optim/nothing: has no unit"):
        unit("optim/nothing")


def test_a_run_took_from_its_start_to_its_last_output(tmp_path: Path) -> None:
    """Started at 10:00:00, last written to at 10:03:20."""
    console = tmp_path / "console.log"
    assert wall_seconds(console) is None
    console.write_text("--- 2026-01-02 10:00:00 UTC\nreading\n--- \n", encoding="utf-8")
    end = 1767348200  # date -d '2026-01-02 10:03:20 UTC' +%s
    os.utime(console, (end, end))
    assert wall_seconds(console) == 200
    # Killed and started again: the time between is not known.
    with console.open("a", encoding="utf-8") as file:
        file.write("--- 2026-01-02 12:00:00 UTC\n")
    assert wall_seconds(console) is None
