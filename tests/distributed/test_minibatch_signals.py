"""What a signal gives of a whole minibatch before the first backward is that of one rank on every
rank, whatever rank works on a row: the sums that PACS reads, the peaks of SIREN, the tokens that
Clip-Cov draws and KL-Cov ranks."""

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

LAYOUTS = [
    pytest.param(2, {"tensor": 2}, marks=pytest.mark.full, id="tensor"),
    pytest.param(2, {"context": 2}, marks=pytest.mark.full, id="context"),
    pytest.param(2, {"pipeline": 2}, marks=pytest.mark.full, id="pipeline"),
]


def learning(path: Path, layout: dict[str, Any], method: Any) -> tuple[Any, ...]:
    """The learner with this method, its only signal, the policy, and a scored step."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    signals = signals_of(method)
    (signal,) = signals.members
    learner = replace(learner, method=method, signals=signals)
    return learner, signal, policy, learner.score(rollouts.collect(1))


def sums(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each minibatch: its rows, and what its loss is given. The old logprobs are set to -1, so
    that the policy has moved by its own logprobs and one a token."""
    learner, signal, policy, scored = learning(path, layout, load_method("pacs"))
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


def peaks(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Of each minibatch, and plainly from the entropies of rows one after another."""
    method = load_method("siren", response_limit=200)
    learner, signal, policy, scored = learning(path, layout, method)
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


def chosen(path: Path, layout: dict[str, Any], name: str) -> dict[str, Any]:
    """Of each minibatch the places of its chosen tokens."""
    knobs = ["policy_loss.share=0.2"]
    if name == "clip_cov":
        knobs += ["policy_loss.cov_low=-0.5", "policy_loss.cov_high=0.5"]
    method = load_method(name, knobs, response_limit=200)
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    learner = replace(learner, method=method, signals=signals_of(method))
    scored = learner.score(rollouts.collect(1))
    found = []
    for rows in learner.plan.minibatches(1, scored):
        placed = learner.placement.rebalanced_for(scored, rows)
        columns = learner.signals.before_minibatch(learner.view(scored, placed, rows))
        found.append(columns["chosen_places"].tolist())
    learner.update(1, scored)  # each token finds its place in every minibatch
    report = {"chosen": found, "lent": num_lent(learner, scored)}
    policy.close()
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def sums_alone(model: Path) -> dict[str, Any]:
    return call(1, sums, model, {})[0]


@pytest.fixture(scope="module")
def peaks_alone(model: Path) -> dict[str, Any]:
    return call(1, peaks, model, {})[0]


def test_each_row_of_a_minibatch_has_its_sum_and_no_other_row_has(sums_alone) -> None:
    report = sums_alone
    assert len(report["minibatches"]) == 6  # 8 prompts, 3 at a time, twice
    for rows, found in report["minibatches"]:
        expected = np.zeros(len(found))
        expected[rows] = np.array(report["plain"])[rows]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
        assert (np.array(found)[rows] != 0).all()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_data_parallel_ranks_know_the_same_bits(model, sums_alone, ranks: int) -> None:
    reports = call(ranks, sums, model, {})
    assert reports[0]["lent"] > 0, "no row went to another rank for an update"
    for report in reports:
        assert report["minibatches"] == sums_alone["minibatches"]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_other_layouts_agree(model, sums_alone, ranks: int, layout: dict[str, int]) -> None:
    for report in call(ranks, sums, model, layout):
        for (rows, found), (wanted_rows, wanted) in zip(
            report["minibatches"], sums_alone["minibatches"], strict=True
        ):
            assert rows == wanted_rows and found == pytest.approx(wanted, rel=1e-6, abs=1e-4)


def test_the_anchor_is_the_mean_of_the_first_minibatch(peaks_alone) -> None:
    report = peaks_alone
    assert len(report["peaks"]) == 6  # 8 prompts, 3 at a time, twice
    assert report["anchor"] == report["peaks"][0][2] > 0
    for threshold, num, mean, anchor in report["peaks"]:
        assert anchor == report["anchor"] and 0 < threshold < mean and num > 10
    assert report["metrics"]["loss/entropy_anchor"] >= 0
    assert report["metrics"]["entropy/nucleus_peak_mean"] == pytest.approx(report["anchor"], 0.2)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layout"), [pytest.param(2, {}, id="data"), *LAYOUTS])
def test_ranks_find_the_same_peaks(model, peaks_alone, ranks: int, layout: dict[str, int]) -> None:
    reports = call(ranks, peaks, model, layout)
    assert layout or reports[0]["lent"] > 0, "no row went to another rank for an update"
    for report in reports:
        assert report["peaks"] == reports[0]["peaks"]
        wanted = torch.tensor(peaks_alone["peaks"])
        torch.testing.assert_close(torch.tensor(report["peaks"]), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "layout"), [pytest.param(2, {}, id="data"), *LAYOUTS])
@pytest.mark.full
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_ranks_choose_the_same_tokens(model, name: str, ranks: int, layout: dict[str, int]) -> None:
    (alone,) = call(1, chosen, model, {}, name)
    assert all(len(places) > 10 for places in alone["chosen"])
    reports = call(ranks, chosen, model, layout, name)
    assert layout or reports[0]["lent"] > 0, "no row went to another rank for an update"
    for report in reports:
        assert report["chosen"] == alone["chosen"]
