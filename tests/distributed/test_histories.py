"""What is remembered of prompts is the same on every rank, and in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.method import load_method
from megatron_rl.signals import signals_of
from tests import zoo
from tests.distributed.owned_rows_worker import ONE_ROW, parts
from tests.ranks import call


def two_visits(path: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Credit of two steps over the same eight prompts, and what is remembered after them."""
    rollouts, learner, policy = parts(path, layout, 1, ONE_ROW)
    method = load_method("dcpo")
    learner = replace(learner, method=method, signals=signals_of(method))
    advantages = []
    for step in (1, 2):
        scored = learner.score(rollouts.collect(step))
        assert scored.credit is not None
        advantages.append(scored.credit.advantages.tolist())
    policy.close()
    return {"advantages": advantages, "state": learner.signals.state()["PromptHistory"]}


@pytest.mark.full  # in the core tier: what is remembered, in unit/loss and unit/trainer
@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (2, {"tensor": 2})], ids=["data", "tensor"])
def test_ranks_remember_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, layout: dict[str, int]
) -> None:
    path = zoo.save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), layers=2)
    (alone,) = call(1, two_visits, path, {})
    assert {visits for visits, _, _ in alone["state"].values()} == {2}
    assert all(alone["advantages"])
    for report in call(ranks, two_visits, path, layout):
        assert report == alone
