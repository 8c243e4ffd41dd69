"""Each remedy of the policy is still needed, and cures what it is there for (real megatron-core, two processes)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.runtime.cpu import REASONS, STAND_INS
from tests.launch import launch

WORKER = Path(__file__).parent / "policy_traps_worker.py"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("traps")
    launch(WORKER, nproc=2, args=[folder, folder / "figures.json"], timeout=400)
    return json.loads((folder / "figures.json").read_text())


def test_every_stand_in_is_listed_and_tried(figures: dict[str, list[Any]]) -> None:
    assert set(REASONS) == set(STAND_INS)
    tried = {label.split()[1] for label in figures["needed"][0] if label.startswith("stand_in")}
    assert tried == set(STAND_INS)


def test_nothing_works_without_a_remedy(figures: dict[str, list[Any]]) -> None:
    for rank in figures["needed"]:
        useless = [label for label, error in rank.items() if not label.startswith("with everything") and not error]
        assert not useless, f"needed no more: {useless}"


def test_everything_works_with_all_remedies(figures: dict[str, list[Any]]) -> None:
    for rank in figures["needed"]:
        broken = {label: error for label, error in rank.items() if label.startswith("with everything") and error}
        assert not broken


def test_interleaved_pipeline_of_two_stages_is_silently_wrong_by_default(figures: dict[str, list[Any]]) -> None:
    for rank in figures["interleaved_two_stages"]:
        assert rank["ours"] <= 1e-5
        assert rank["default"] > 0.1, "megatron's default is right now: the setting may go"


def test_per_token_loss_must_be_set_before_ddp_wraps(figures: dict[str, list[Any]]) -> None:
    for rank in figures["late_loss_setting"]:
        assert rank["late"] == pytest.approx(rank["ours"] / 2, rel=1e-3), "two data-parallel ranks would train with half the gradient"


def test_adam_steps_are_unshared(figures: dict[str, list[Any]]) -> None:
    for rank in figures["shared_step"]:
        assert rank["shared"] == rank["parameters"] - 1 > 1
        assert rank["steps"] == [3.0], "one step before and two after"


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(figures: dict[str, list[Any]]) -> None:
    for rank in figures["non_finite"]:
        assert rank["skipped"]
        assert rank["weights_kept"]
        assert not rank["next_skipped"]
        assert rank["next_norm"] == figures["non_finite"][0]["next_norm"]


def test_the_global_random_state_is_not_consumed(figures: dict[str, list[Any]]) -> None:
    assert figures["random_state"] == [True, True]
