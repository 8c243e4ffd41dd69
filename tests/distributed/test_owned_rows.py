"""Tokens lie with the ranks that train them, and metrics do not depend on how many those are.

The real policy and the trainer's own classes, on 1, 2 and 4 data-parallel ranks and beside tensor
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.distributed import owned_rows_worker
from tests.ranks import call

NUM_ROWS = 32
LAYOUTS = {"1": (1, {}), "2": (2, {}), "4": (4, {}), "2x2": (4, {"tensor": 2})}
# Every response has its figures from one rank, and sums are over responses in canonical order.
OF_RESPONSES = ("rollout/", "reward/", "credit/", "mismatch/")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def reports(model: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: call(count, owned_rows_worker.step, model, layout)
        for name, (count, layout) in LAYOUTS.items()
    }


def test_metrics_of_responses_are_equal_bit_for_bit_on_1_2_and_4_ranks(reports):
    expected = reports["1"][0]["metrics"]
    compared = [key for key in expected if key.startswith(OF_RESPONSES)]
    assert {"mismatch/kl_k3", "rollout/entropy", "reward/mean"} < set(compared)
    for name in ("1", "2", "4"):
        for report in reports[name]:
            assert report["advantages"] == reports["1"][0]["advantages"]
            for key in compared:
                assert float(report["metrics"][key]).hex() == float(expected[key]).hex(), key


def test_all_metrics_agree_where_rounding_may_differ(reports):
    """Gradients are summed in the order of the ranks, and tensor ranks round otherwise."""
    expected = reports["1"][0]["metrics"]
    for name in LAYOUTS:
        for report in reports[name]:
            assert report["metrics"].keys() == expected.keys()
            assert report["metrics"] == pytest.approx(expected, rel=2e-3, abs=1e-5), name


def test_a_row_has_one_owner_and_lies_on_the_ranks_that_work_with_it(reports):
    for name, (count, layout) in LAYOUTS.items():
        assert sum(report["owned"] for report in reports[name]) == NUM_ROWS
        copies = layout.get("tensor", 1)
        assert sum(report["rows"] for report in reports[name]) == NUM_ROWS * copies
        assert max(report["rows"] for report in reports[name]) < 1.5 * NUM_ROWS * copies / count


def test_minibatches_borrow_rows_from_other_owners(reports):
    assert reports["1"][0]["lent"] == 0
    assert all(report["lent"] > 0 for name in ("2", "4", "2x2") for report in reports[name])


def test_rank_0_can_have_all_for_eyes_and_for_a_bundle(reports):
    expected = reports["1"][0]["on_rank_0"]
    assert len(expected["texts"]) == len(set(expected["texts"])) == 3
    assert set(expected["digests"]) == {
        "token_ids",
        "sampler_logprobs",
        "old_logprobs",
        "ref_logprobs",
    }
    for name in ("2", "4"):
        assert reports[name][0]["on_rank_0"] == expected
    for exact in ("token_ids", "sampler_logprobs"):  # tensor ranks round logprobs otherwise
        beside_tensor_ranks = reports["2x2"][0]["on_rank_0"]["digests"]
        assert beside_tensor_ranks[exact] == expected["digests"][exact]


@pytest.mark.full
def test_nothing_of_a_token_goes_to_the_world(model):
    """Responses four times as long: what is told to all ranks has the same size, what goes from
    rank to rank is four times as much."""
    layout = {"tensor": 2}
    short = call(4, owned_rows_worker.messages, model, layout, 1)
    long = call(4, owned_rows_worker.messages, model, layout, 4)
    for of_short, of_long in zip(short, long, strict=True):
        to_all = [kind for kind in of_long if kind.ranks == 4 and kind.name != "all_to_all"]
        assert any(kind.group == "world" for kind in to_all)
        for kind in to_all:
            grown = of_long[kind] - of_short[kind]
            assert abs(grown) <= 2 * NUM_ROWS, f"{kind}: {of_short[kind]}, then {of_long[kind]}"
    rows = [kind for kind in long[0] if kind.name == "all_to_all"]
    assert {kind.dtype for kind in rows} == {"int32", "float32"}
    for kind in rows:
        sent = [sum(rank[kind] for rank in ranks) for ranks in (short, long)]
        assert 3 < sent[1] / sent[0] < 5
