"""The metrics of an evaluation, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.reporting.evaluation import (
    ScoredResponses,
    detailed_metrics,
    evaluation_metrics,
    evaluation_table,
    majority_is_right,
)
from megatron_rl.reporting.metrics import metric


@pytest.mark.parametrize(
    ("extracted", "correct", "expected"),
    [
        (["7", "8", "8"], [True, False, False], False),
        (["8", "7", "7"], [False, True, True], True),
        (["7", "8", "8", "7"], [True, False, False, True], True),  # a tie: 7 came first
        (["8", "7", "7", "8"], [False, True, True, False], False),
        (["", "", "7"], [False, False, True], True),  # who has no answer does not vote
        ([None, None, "7"], [False, False, True], True),
        (["", ""], [False, False], False),
        ([None, None], [True, True], None),
        ([None, ""], [False, False], None),
    ],
)
def test_majority_is_of_extracted_answers(extracted, correct, expected):
    assert majority_is_right(extracted, correct) is expected


def scored(sources=("a", "b")) -> ScoredResponses:
    """Two prompts of four responses: one right answer of four, and three of four."""
    return ScoredResponses(
        group_ids=np.repeat([0, 1], 4),
        data_sources=[source for source in sources for _ in range(4)],
        correct=np.array([True, False, False, False, True, True, False, True]),
        rewards=np.array([1.5, 0.5, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        lengths=np.array([1, 2, 3, 4, 5, 6, 7, 8]),
        truncated=np.array([False, False, True, False, False, False, False, False]),
        extracted=["7", "8", "8", "", "5", "5", "4", "5"],
        has_verdict=np.ones(8, dtype=bool),
        categories=[()] * 8,
    )


def test_metrics_of_two_prompts_by_hand():
    # pass@2: of six pairs 3 hold the one right response, all hold one of the three.
    assert evaluation_metrics(scored(("a", "a")), [1, 2, 4]) == {
        "eval/accuracy": 0.5,
        "eval/reward_mean": 0.625,
        "eval/response_tokens_mean": 4.5,
        "eval/truncated_share": 0.125,
        "eval/pass_at_1": 0.5,
        "eval/pass_at_2": 0.75,
        "eval/pass_at_4": 1.0,
        "eval/maj_at_4": 0.5,
    }


def test_a_row_of_a_run_has_accuracy_by_source_and_no_majority_of_single_responses():
    whole = scored()
    single = ScoredResponses(
        group_ids=np.array([0, 1]),
        data_sources=["a", "b"],
        correct=whole.correct[:2],
        rewards=whole.rewards[:2],
        lengths=whole.lengths[:2],
        truncated=whole.truncated[:2],
        extracted=whole.extracted[:2],
        has_verdict=whole.has_verdict[:2],
        categories=whole.categories[:2],
    )
    assert list(evaluation_metrics(single, [1])) == [
        "eval/accuracy",
        "eval/reward_mean",
        "eval/response_tokens_mean",
        "eval/truncated_share",
        "eval/pass_at_1",
        "eval/accuracy/a",
        "eval/accuracy/b",
    ]
    metrics = evaluation_metrics(whole, [])
    assert (metrics["eval/accuracy/a"], metrics["eval/accuracy/b"]) == (0.25, 0.75)


def test_responses_without_a_verdict_count_in_lengths_alone():
    """One of four leaves the first prompt, three of four the second."""
    has_verdict = np.array([True, True, True, False, False, False, False, True])
    some = ScoredResponses(**{**vars(scored()), "has_verdict": has_verdict})
    assert evaluation_metrics(some, [1, 2, 4]) == {
        "eval/excluded_share": 0.5,
        "eval/accuracy": 0.5,
        "eval/reward_mean": 0.75,
        "eval/response_tokens_mean": 4.5,
        "eval/truncated_share": 0.125,
        "eval/pass_at_1": pytest.approx((1 / 3 + 1) / 2),
        "eval/pass_at_2": pytest.approx(2 / 3),  # of the first prompt; the second has one left
        "eval/maj_at_4": 0.5,  # 8 has two votes of three, and is wrong
        "eval/accuracy/a": pytest.approx(1 / 3),
        "eval/accuracy/b": 1.0,
    }
    table = evaluation_table([{"step": 0, **detailed_metrics(some, [1])}])
    assert table.split("\n")[0].endswith("excluded %") and table.split("\n")[2].endswith("50.0")
    none = ScoredResponses(**{**vars(scored()), "has_verdict": np.zeros(8, dtype=bool)})
    assert detailed_metrics(none, [1])["eval/excluded_share"] == 1
    assert [key for key in detailed_metrics(none, [1]) if "accuracy" in key or "pass" in key] == []
    lines = evaluation_table([{"step": 0, **detailed_metrics(none, [1])}]).split("\n")[2:]
    assert [line.split()[1:3] for line in lines] == [["all", "-"], ["a", "-"], ["b", "-"]]


def test_programs_have_no_majority():
    whole = scored()
    no_answers = ScoredResponses(**{**vars(whole), "extracted": [None] * 8})
    assert "eval/maj_at_4" not in evaluation_metrics(no_answers, [1])
    half = ScoredResponses(**{**vars(whole), "extracted": [None] * 4 + whole.extracted[4:]})
    assert evaluation_metrics(half, [1])["eval/maj_at_4"] == 1.0  # of the second prompt alone


def test_bounds_of_eight_prompts_by_hand():
    """Accuracies 1/4 and 3/4, four of each: sample deviation sqrt(1/14), t(0.975, 7) = 2.3646."""
    two = vars(scored())
    many = {key: np.concatenate([two[key]] * 4) for key in two if isinstance(two[key], np.ndarray)}
    lists = {key: list(two[key]) * 4 for key in two if key not in many}
    metrics = detailed_metrics(
        ScoredResponses(**many | lists | {"group_ids": np.repeat(range(8), 4)}), [2]
    )
    half = 2.364624 * (1 / 14 / 8) ** 0.5
    assert metrics["eval_low/accuracy"] == pytest.approx(0.5 - half)
    assert metrics["eval_high/accuracy"] == pytest.approx(0.5 + half)


def test_bounds_and_sources_of_an_evaluation_alone():
    metrics = detailed_metrics(scored(), [2])
    assert metrics["eval/pass_at_2/a"] == 0.5
    assert metrics["eval/maj_at_4/a"] == 0.0
    assert metrics["eval/maj_at_4/b"] == 1.0
    assert metrics["eval/response_tokens_mean/b"] == 6.5
    assert metrics["eval/truncated_share/a"] == 0.25
    # One prompt says nothing of a share, and two with 1/4 and 3/4 no more: 12.7 standard errors.
    for part in ("accuracy", "pass_at_2", "accuracy/a"):
        assert (metrics[f"eval_low/{part}"], metrics[f"eval_high/{part}"]) == (0.0, 1.0)
    # The first responses of both are a run with 1, the others ones with 1/2, 0 and 1/2.
    spread = "eval/accuracy_std_of_4_runs"
    assert metrics[spread] == pytest.approx((0.5 / 3) ** 0.5)
    assert metrics[f"{spread}/a"] == pytest.approx((0.75 / 3) ** 0.5)
    assert all(metric(key) for key in metrics)
    shared = evaluation_metrics(scored(), [2])
    assert {key: metrics[key] for key in shared} == shared


def test_a_prompt_is_in_each_of_its_categories() -> None:
    categories = [("level=1", "skills=logic")] * 4 + [("skills=logic", "skills=logic")] * 4
    found = evaluation_metrics(
        ScoredResponses(**{**vars(scored("aa")), "categories": categories}), [1]
    )
    assert found["eval/accuracy/level=1"] == 0.25
    assert found["eval/accuracy/skills=logic"] == 0.5
    assert "eval/accuracy/a" not in found, "the only source"
    found = evaluation_metrics(
        ScoredResponses(**{**vars(scored("ab")), "categories": categories}), [1]
    )
    assert found["eval/accuracy/b/skills=logic"] == found["eval/accuracy/b"] == 0.75
    assert all(metric(key) for key in found)


def test_runs_of_several_lengths_or_without_a_verdict_have_no_spread() -> None:
    whole = vars(scored("aa"))
    lost = ScoredResponses(**{**whole, "has_verdict": np.array([True] * 7 + [False])})
    other = ScoredResponses(**{**whole, "group_ids": np.array([0, 0, 0, 1, 1, 1, 1, 1])})
    for some in (lost, other):
        assert not [key for key in detailed_metrics(some, [1]) if "std_of" in key]


def test_the_table_has_a_line_for_each_step_and_source(tmp_path):
    rows = [{"step": step, **detailed_metrics(scored(), [1, 2])} for step in (0, 20)]
    lines = [" ".join(line.split()) for line in evaluation_table(rows).splitlines()]
    assert lines[0] == (
        "step source accuracy % std of 4 runs % pass@1 % pass@2 % maj@4 % tokens truncated %"
    )
    assert lines[2] == (
        "0 all 50.0 [0.0, 100.0] 40.8 50.0 [0.0, 100.0] 75.0 [0.0, 100.0] 50.0 [0.0, 100.0]"
        " 4.5 12.5"
    )
    no = "[0.0, 100.0]"
    assert lines[3] == f"0 a 25.0 {no} 50.0 25.0 {no} 50.0 {no} 0.0 {no} 2.5 25.0"
    assert [line.split()[0] for line in lines[2:]] == ["0"] * 3 + ["20"] * 3
