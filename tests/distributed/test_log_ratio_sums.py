"""The sums that PACS reads: of every response of a minibatch, known to every rank before the first
backward, whatever rank works on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.method import load_method
from megatron_rl.passes import TokenScores
from megatron_rl.rollouts.rows.partials import of_all_rows, response_sums
from megatron_rl.signals import signals_of
from tests import zoo
from tests.distributed.owned_rows_worker import ONE_ROW, num_lent, parts
from tests.ranks import call


def sums(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each minibatch: its rows, and what its loss is given. The old logprobs are set to -1, so
    that the policy has moved by its own logprobs and one a token."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    method = load_method("pacs")
    signals = signals_of(method)
    (signal,) = signals.members
    learner = replace(learner, method=method, signals=signals)
    scored = learner.score(rollouts.collect(1))
    assert scored.old is not None
    moved = scored.old.logprobs.numpy() + 1
    lengths = scored.responses.tokens.lengths
    world = learner.placement.world
    plain = of_all_rows(scored.responses, response_sums(moved, lengths)[:, None], world)
    experience = replace(scored, old=TokenScores(torch.full_like(scored.old.logprobs, -1)))
    minibatches = []
    for rows in learner.plan.minibatches(1, experience):
        placed = learner.placement.rebalanced_for(experience, rows)
        found = signal.before_minibatch(learner.view(experience, placed, rows))
        minibatches.append((list(rows), found["log_ratio_sums"].tolist()))
    learner.update(1, scored)  # the same sums reach the loss of every minibatch
    report = {"plain": plain[:, 0].tolist(), "minibatches": minibatches}
    report["lent"] = num_lent(learner, experience)
    policy.close()
    return report


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = zoo.save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), layers=2)
    (report,) = call(1, sums, path, {})
    return path, report


def test_each_row_of_a_minibatch_has_its_sum_and_no_other_row_has(alone) -> None:
    _, report = alone
    assert len(report["minibatches"]) == 6  # 8 prompts, 3 at a time, twice
    for rows, found in report["minibatches"]:
        expected = np.zeros(len(found))
        expected[rows] = np.array(report["plain"])[rows]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
        assert (np.array(found)[rows] != 0).all()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_data_parallel_ranks_know_the_same_bits(alone, ranks: int) -> None:
    path, expected = alone
    reports = call(ranks, sums, path, {})
    assert reports[0]["lent"] > 0, "no row went to another rank for an update"
    for report in reports:
        assert report["minibatches"] == expected["minibatches"]


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}])
def test_other_layouts_agree(alone, layout: dict[str, int]) -> None:
    path, expected = alone
    for report in call(2, sums, path, layout):
        for (rows, found), (wanted_rows, wanted) in zip(
            report["minibatches"], expected["minibatches"], strict=True
        ):
            assert rows == wanted_rows and found == pytest.approx(wanted, rel=1e-6, abs=1e-4)
