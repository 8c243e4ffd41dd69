"""Checkpoints of a real run, evaluated alone through the command line: the numbers of the trainer,
from any number of engines and in any portions."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import launch

ASKED = (
    "evaluation.responses_per_prompt=8",
    "evaluation.temperature=1.0",
    "evaluation.pass_at=[1,2,8]",
)


def rows(folder: Path) -> dict[int, dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def answers(folder: Path) -> pa.Table:
    return pq.read_table(folder / "responses")


@pytest.mark.full  # in the core tier: tests/unit/evaluation/test_evaluation.py, with a bandit
@pytest.mark.timeout(900)
def test_checkpoints_are_evaluated_as_their_run_did_and_nothing_is_asked_twice(tmp_path):
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    run = tmp_path / "run"
    words = [
        *overrides(tmp_path, run),
        "trainer.num_steps=4",
        "checkpoint.every_steps=2",
        "evaluation.every_steps=2",
        *ASKED,
    ]
    launch("megatron_rl.train", 2, words, 240)

    every = [run, "--steps", "all"]
    first = launch("megatron_rl.evaluate", 2, every, 200)
    out = run / "evaluation"
    trained = rows(run)
    found = rows(out)
    assert list(found) == [0, 2, 4]
    for step, row in found.items():
        wanted = {key: value for key, value in trained[step].items() if key.startswith("eval/")}
        assert "eval/maj_at_8" in wanted
        assert {key: row[key] for key in wanted} == wanted
        assert row["eval_low/accuracy"] <= row["eval/accuracy"] <= row["eval_high/accuracy"]
    stored = answers(out)
    for step, row in found.items():
        of_step = stored.filter(pa.compute.equal(stored["step"], step)).to_pylist()
        assert len(of_step) == 8 * 8
        assert sum(each["correct"] for each in of_step) / 64 == row["eval/accuracy"]
        assert all((each["response"][:1] == each["answer"]) is each["correct"] for each in of_step)
    assert first.stdout.count("building the engine ...") == 1, first.stdout
    assert "step  source" in first.stdout

    again = launch("megatron_rl.evaluate", 2, every, 200)
    assert "building the engine" not in again.stdout
    assert again.stdout.count("all its prompts are answered") == 3
    assert rows(out) == found

    # Two engines of one process in place of one of two, and portions of three prompts.
    other = tmp_path / "other"
    apart = ["rollout.tensor=1", "--prompts-at-a-time", "3", "--out", other]
    launch("megatron_rl.evaluate", 2, [*every, *apart], 200)
    assert rows(other) == found
    assert answers(other).equals(stored)

    # The export holds the weights of the last step; its settings are given as those of a run.
    model = [*overrides(tmp_path, run), *ASKED, f"model.path={run / 'export'}"]
    alone = tmp_path / "alone"
    launch("megatron_rl.evaluate", 2, [*model, "--out", alone], 200)
    assert rows(alone) == {0: found[4] | {"step": 0}}

    refused = launch(
        "megatron_rl.evaluate", 2, [*every, "evaluation.temperature=0.5"], 200, check=False
    )
    assert "evaluation.temperature = 1.0 there, 0.5 here" in refused.stdout
    assert "building the engine" not in refused.stdout
