"""Metrics of a rollout, against values by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.reporting.metrics import TABLE
from megatron_rl.rollouts.rows.experience import experience_of
from megatron_rl.rollouts.rows.metrics import rollout_metrics
from megatron_rl.types import Score
from tests.unit.rollouts.test_responses import responses

CORRECT = "rollout/response_tokens_correct_mean"
WRONG = "rollout/response_tokens_wrong_mean"


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        ([True, False, True, False, False], {CORRECT: 2.0, WRONG: 11 / 3}),  # 1 3 and 2 4 5 tokens
        ([False] * 5, {WRONG: 3.0}),
        ([True] * 5, {CORRECT: 3.0}),
    ],
)
def test_lengths_of_right_and_wrong_responses(correct, expected):
    """A step without a correct response has no mean length of them."""
    scores = [Score(float(right), right) for right in correct]
    metrics = rollout_metrics(experience_of(replace(responses(), scores=scores)))
    found = {key: value for key, value in metrics.items() if key in (CORRECT, WRONG)}
    assert found == pytest.approx(expected, abs=1e-12)
    assert metrics["rollout/response_tokens_mean"] == 3
    assert TABLE[CORRECT].unit == TABLE[WRONG].unit == "tokens"
