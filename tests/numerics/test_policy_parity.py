"""The policy on real megatron-core, in many layouts, against transformers and torch on the same weights (float32)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launch
from tests.numerics.policy_cases import CASES, Case

WORKER = Path(__file__).parent / "policy_worker.py"
TOKENS = 48  # response tokens of the batch


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Figures of a case, on every rank: one launch for each (number of processes, tier)."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def run(processes: int, full: bool) -> dict[str, Any]:
        out = folder / f"figures_{processes}_{full}.json"
        names = [case.name for case in CASES if case.processes == processes and case.full == full]
        launch(WORKER, nproc=processes, args=[folder, out, *names], timeout=900)
        return json.loads(out.read_text())

    return lambda case: run(case.processes, case.full)[case.name]


def worst(ranks: list[dict[str, Any]], prefix: str) -> float:
    values = [value for rank in ranks for key, value in rank.items() if key.startswith(prefix)]
    assert values, f"no figure {prefix}"
    return max(values)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case.full else (), id=case.name) for case in CASES])
def test_policy_equals_transformers(case: Case, figures: Any) -> None:
    ranks = figures(case)
    assert len(ranks) == case.processes
    assert all(rank["round_trip"] for rank in ranks), "HF -> Megatron -> HF is not bit-equal"
    assert worst(ranks, "logits") <= 1e-5
    assert worst(ranks, "logprobs_") <= 1e-5
    assert worst(ranks, "entropy_") <= 1e-5
    assert worst(ranks, "loss_") <= 2e-6
    for rank in ranks:
        for key, metrics in rank.items():
            if key.startswith("metrics_"):
                assert metrics == {"tokens": float(TOKENS), "index_max": float(TOKENS - 1)}, key
    if not case.sharded_gradients:
        assert worst(ranks, "gradients_") <= 2e-6
        assert worst(ranks, "split_") <= 2e-6, "the gradient depends on the cut into micro-batches"
    assert worst(ranks, "grad_norm") <= 2e-6
    assert worst(ranks, "update") <= 1e-5, "one optimizer step differs from torch.optim.AdamW"
    assert not any(rank["skipped"] for rank in ranks)
    assert all(rank["own_scores"] for rank in ranks), "the scores of an update differ from those of a pass before it"
    assert all(rank["reference_kept"] for rank in ranks), "the reference weights moved with the policy"
    assert worst(ranks, "policy_moved") > 0.1
