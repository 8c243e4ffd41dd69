"""The policy on real megatron-core, in many layouts, against transformers and torch on the same
weights (float32)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.numerics.policy_cases import CASES, Case, random_cases
from tests.numerics.policy_worker import compare, reference
from tests.ranks import call

NUM_RANDOM = 40  # layouts
TOKENS = 48  # response tokens of the batch
FIGURES = ("logits", "logprobs_whole", "gradients_whole", "update")  # that are printed


@pytest.fixture(scope="module")
def answers(hf_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a case's model, and what transformers says about it."""
    deeper = tmp_path_factory.mktemp("models")

    @cache
    def answer(model: str, layers: int | None) -> tuple[Path, dict[str, Any]]:
        path = hf_models / model
        if layers is not None:
            path = zoo.save_tiny_model(model, deeper / f"{model}-{layers}", layers=layers)
        return path, reference(model, layers)

    return answer


def worst(ranks: list[dict[str, Any]], prefix: str) -> float:
    values = [value for rank in ranks for key, value in rank.items() if key.startswith(prefix)]
    assert values, f"no figure {prefix}"
    return max(values)


def check(case: Case, ranks: list[dict[str, Any]], bound: float, tokens: int) -> None:
    """``ranks``: what ``compare`` returned on each, for a batch of so many response ``tokens``.
    ``bound``: of logits, logprobs and entropies, in nats."""
    figures = {key: worst(ranks, key) for key in FIGURES if any(key in each for each in ranks)}
    print(case.name, *(f"{key} {value:.1e}" for key, value in figures.items()))
    assert all(rank["round_trip"] for rank in ranks), "HF -> Megatron -> HF is not bit-equal"
    assert worst(ranks, "logits") <= bound
    assert worst(ranks, "logprobs_") <= bound
    assert worst(ranks, "entropy_") <= bound
    assert worst(ranks, "loss_") <= 2e-6
    for rank in ranks:
        for key, metrics in rank.items():
            if key.startswith("metrics_"):
                assert metrics == {"tokens": float(tokens), "index_max": float(tokens - 1)}, key
    if not case.sharded_gradients:
        assert worst(ranks, "gradients_") <= 2e-6
        assert worst(ranks, "split_") <= 2e-6, "the gradient depends on the cut into micro-batches"
    assert worst(ranks, "grad_norm") <= 2e-6
    assert worst(ranks, "update") <= 1e-5, "one optimizer step differs from torch.optim.AdamW"
    assert not any(rank["skipped"] for rank in ranks)
    assert all(rank["own_scores"] for rank in ranks), (
        "the scores of an update differ from those of a pass before it"
    )
    assert all(rank["reference_kept"] for rank in ranks), (
        "the reference weights moved with the policy"
    )
    assert worst(ranks, "policy_moved") > 0.1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if case.full else (), id=case.name)
        for case in CASES
    ],
)
def test_policy_equals_transformers(case: Case, answers: Any) -> None:
    compared(case, answers)


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_random_layouts_equal_transformers(number: int, answers: Any) -> None:
    case = random_cases(NUM_RANDOM)[number]
    print(case.name)
    compared(case, answers)


def compared(case: Case, answers: Any) -> None:
    ranks = call(case.processes, compare, case, *answers(case.model, case.layers), timeout=200)
    check(case, ranks, bound=5e-6, tokens=TOKENS)
