"""Partial rollouts by real engines whose weights change from step to step: the same experience, bit
for bit, from 1 and 2 replicas and whatever the timing; and every token has the logprob that
transformers gives it, by the weights that sampled it, behind all tokens before it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.test_streaming_engines import found_by

WORKER = Path(__file__).parent / "partial_worker.py"
BOUND = 1e-5  # nats of one token; both sides compute in float32
LAYOUTS = {"one": (1, 1, 0), "held up": (1, 1, 1), "two": (2, 1, 1)}


found = partial(found_by, WORKER)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found(tmp_path_factory.mktemp("partial"), *LAYOUTS["one"])


@pytest.mark.full
def test_every_token_has_the_logprob_of_the_weights_that_sampled_it(
    expected: list[dict[str, Any]],
) -> None:
    assert max(step["gap"] for step in expected) < BOUND
    ages = [number - version for number, step in enumerate(expected) for version in versions(step)]
    assert max(ages) == 2 and min(ages) == 0
    assert sum(step["metrics"]["source/mixed_share"] > 0 for step in expected) >= 2


def versions(step: dict[str, Any]) -> list[int]:
    return step["weight_versions"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["held up", "two"])
def test_the_same_bits_for_any_number_of_replicas_and_any_timing(
    layout: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert found(tmp_path, *LAYOUTS[layout]) == expected


@pytest.mark.full
def test_tensor_ranks_sample_the_same_tokens(
    expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Their sums are in another order, so logprobs are rounded otherwise."""
    for exact, step in zip(expected, found(tmp_path, 2, 2, 1), strict=True):
        rounded = {"sampler_logprobs": step["sampler_logprobs"], "gap": step["gap"]}
        assert step == exact | rounded
        assert step["gap"] < BOUND
