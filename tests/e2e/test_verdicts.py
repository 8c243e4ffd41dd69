"""Responses without a verdict through both engines: the weights are those of the run without
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.toy import overrides, untimed_rows, write_data, write_model
from tests.launch import launch

OWN = {"reward/excluded_share", "tokens/no_verdict", "tokens/discarded"}
PIPELINE = ["parallel=pp2", "rollout.tensor=1"]


def trained(folder: Path, size: int, *more: str) -> tuple[list[str], list[dict]]:
    """Digests of the weights before and after, and metrics, of a run with ``size`` responses a
    prompt, of which the first four can be judged."""
    run_dir = folder / f"run {size}"
    settings = overrides(
        folder,
        run_dir,
        f"batch.responses_per_prompt={size}",
        "reward.max_excluded_share=0.5",
        "trainer.num_steps=3",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "checkpoint.every_steps=0",
        "checkpoint.export_at_end=false",
        *more,
    )
    out = folder / f"{size}.json"
    launch("tests/e2e/verdicts_worker.py", 2, [out, 4, *settings], 250)
    return json.loads(out.read_text()), untimed_rows(run_dir)


@pytest.mark.full  # in the core tier: the gradient alone (unit/rollouts/test_verdicts.py)
@pytest.mark.parametrize(
    "more",
    [
        ["method=dapo"],
        ["method=a_grae", *PIPELINE],
        ["method=reinforce_pp", "parallel=single", "rollout.tensor=1"],
    ],
    ids=["tensor", "pipeline", "data"],
)
@pytest.mark.timeout(550)
def test_the_weights_are_those_of_the_run_without_them(tmp_path: Path, more: list[str]) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    (start, end), rows = trained(tmp_path, 6, *more)
    (other_start, other_end), others = trained(tmp_path, 4, *more)
    assert start == other_start and end == other_end != start
    assert [row["reward/excluded_share"] for row in rows] == [1 / 3] * 3
    assert all(row["tokens/no_verdict"] for row in rows)
    for row, other in zip(rows, others, strict=True):
        assert {key for key in row if row[key] != other.get(key)} <= OWN
