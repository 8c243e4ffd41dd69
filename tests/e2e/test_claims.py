"""A claim from nothing to its page: tasks, starting model, paired runs, exact accuracy, verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from examples.claims.lab.exact import measured
from megatron_rl.reporting.metrics_file import read_metrics, series
from tests.launch import REPO, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CLAIM = {
    "title": "Two methods",
    "source": "nobody",
    "says": "nothing",
    "expected": "nothing",
    "cells": {"grpo": ["method=grpo"], "psr": ["method=psr"]},
    "differ": ["method"],
    "experiment": "lab_exact",
    "lab": ["--exact"],
    "branch_from": ["method=grpo"],
    "num_seeds": 2,
    "checks": [{"metric": "eval/pass_at_2", "more": "psr", "less": "grpo"}],
    "curves": ["eval/pass_at_1", "eval/pass_at_2", "rollout/entropy"],
}
SHORT = [
    "trainer.num_steps=5",
    "batch.prompts_per_step=4",
    "batch.prompts_per_minibatch=4",
    "checkpoint.export_every_steps=5",
    "evaluation.at_start=true",
    "evaluation.at_end=true",
    "evaluation.num_prompts=48",
    "evaluation.responses_per_prompt=64",
    "evaluation.pass_at=[1,2]",
]


def test_a_claim_is_run_and_written_down(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "claim.yaml").write_text(yaml.safe_dump(CLAIM), encoding="utf-8")
    table = (REPO / "examples" / "claims" / "README.md").read_text("utf-8")
    words = [sys.executable, "tools/claims.py", "run", str(folder)]
    words += ["--out", str(tmp_path / "runs"), *SHORT]

    run(words, 800)

    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text("utf-8").splitlines()]
    assert [(row["cell"], row["seed"]) for row in rows] == [
        (cell, seed) for cell in ("grpo", "psr") for seed in (1, 2)
    ]
    of_seed = {(row["cell"], row["seed"]): row["metrics"] for row in rows}
    at_start = "eval/pass_at_1"
    for seed in (1, 2):  # a pair: the same weights, asked the same
        assert of_seed["grpo", seed][at_start]["0"] == of_seed["psr", seed][at_start]["0"]
        # Its branch begins where its own first run ended.
        trunk = next(tmp_path.glob(f"runs/method_grpo_--exact/seed-{seed}"))
        last = measured(trunk)[-1]
        assert last["step"] == 5
        assert of_seed["psr", seed][at_start]["0"] == pytest.approx(last[at_start], abs=1e-6)
    assert of_seed["psr", 1][at_start]["0"] != of_seed["psr", 2][at_start]["0"]
    # Exact pass@1 beside that of 48 x 64 answers of the engine, at the start and after training.
    sampled = series(read_metrics(next(tmp_path.glob("runs/*psr*/seed-1/metrics.jsonl"))), at_start)
    assert sampled[0] == [0, 5]
    for step, share in zip(*sampled, strict=True):
        exact = of_seed["psr", 1][at_start][str(step)]
        assert 0.05 < exact < 0.95
        assert share == pytest.approx(exact, abs=4 * (exact * (1 - exact) / (48 * 64)) ** 0.5)
    page = (folder / "README.md").read_text("utf-8")
    assert "| eval/pass_at_2: psr above grpo |" in page
    assert "last weights of its run of `method=grpo`" in page
    assert (folder / "curves.png").stat().st_size > 10_000
    assert (REPO / "examples" / "claims" / "README.md").read_text("utf-8") == table

    data = (folder / "data.jsonl").read_bytes()
    again = run(words, 200).stdout
    assert again.count("finished before") == 6
    assert (folder / "data.jsonl").read_bytes() == data
