"""Where the policy is most uncertain in a minibatch is the same for every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.method import load_method
from megatron_rl.signals import signals_of
from tests import zoo
from tests.distributed.owned_rows_worker import ONE_ROW, num_lent, parts
from tests.ranks import call


def peaks(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each minibatch, and plainly from the entropies of rows one after another."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    method = load_method("siren", response_limit=200)
    signals = signals_of(method)
    (signal,) = signals.members
    learner = replace(learner, method=method, signals=signals)
    scored = learner.score(rollouts.collect(1))
    found = []
    for rows in learner.plan.minibatches(1, scored):
        placed = learner.placement.rebalanced_for(scored, rows)
        columns = signal.before_minibatch(learner.view(scored, placed, rows))
        found.append(columns["peaks"].tolist())
    anchor = signal.state()["anchor"]
    metrics = learner.update(1, scored)
    assert signal.state()["anchor"] == anchor
    report = {"peaks": found, "lent": num_lent(learner, scored), "anchor": anchor}
    report["metrics"] = metrics
    policy.close()
    return report


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = zoo.save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), layers=2)
    (report,) = call(1, peaks, path, {})
    return path, report


def test_the_anchor_is_the_mean_of_the_first_minibatch(alone) -> None:
    _, report = alone
    assert len(report["peaks"]) == 6  # 8 prompts, 3 at a time, twice
    assert report["anchor"] == report["peaks"][0][2] > 0
    for threshold, num, mean, anchor in report["peaks"]:
        assert anchor == report["anchor"] and 0 < threshold < mean and num > 10
    assert report["metrics"]["loss/entropy_anchor"] >= 0
    assert report["metrics"]["entropy/nucleus_peak_mean"] == pytest.approx(report["anchor"], 0.2)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {}),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.full),
        pytest.param(2, {"context": 2}, marks=pytest.mark.full),
        pytest.param(2, {"pipeline": 2}, marks=pytest.mark.full),
    ],
    ids=["data", "tensor", "context", "pipeline"],
)
def test_ranks_find_the_same(alone, ranks: int, layout: dict[str, int]) -> None:
    path, expected = alone
    reports = call(ranks, peaks, path, layout)
    assert layout or reports[0]["lent"] > 0, "no row went to another rank for an update"
    for report in reports:
        assert report["peaks"] == reports[0]["peaks"]
        wanted = torch.tensor(expected["peaks"])
        torch.testing.assert_close(torch.tensor(report["peaks"]), wanted, rtol=1e-5, atol=1e-6)
