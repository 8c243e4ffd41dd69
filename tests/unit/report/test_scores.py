"""Scores, differences and cost against values by hand."""

from __future__ import annotations

from math import inf, sqrt
from pathlib import Path

import pytest
from scipy import stats

from megatron_rl.reporting.scores import compare, seed_columns
from tests.unit.report.made_runs import variants_in, write_run
from tools.reporting.tables import cost, course, course_table, score
from tools.reporting.variants import Variant


def test_a_paired_difference_of_three_seeds_by_hand():
    variant = {1: 0.5, 2: 0.7, 3: 0.9, 7: 0.1}
    baseline = {3: 0.6, 2: 0.5, 1: 0.4, 8: 0.9}
    # Differences 0.1 0.2 0.3; seeds 7 and 8 have no partner.
    num_pairs, interval, word = compare(variant, baseline)
    assert (num_pairs, word) == (3, "not shown")
    assert interval.mean == pytest.approx(0.2)
    half = 4.302653 * 0.1 / sqrt(3)  # the t of 2 degrees of freedom times the standard error
    assert (interval.low, interval.high) == pytest.approx((0.2 - half, 0.2 + half))


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.19, 0.2, 0.21], "higher"),
        ([-0.19, -0.2, -0.21], "lower"),
        ([0.1, -0.1, 0.2], "not shown"),
        ([0.2], "not shown (one seed)"),
        ([0.25, 0.25], "not shown (no spread)"),
    ],
)
def test_the_word_is_decided_by_the_interval(differences, word):
    baseline = dict.fromkeys(range(len(differences)), 0.0)
    assert compare(dict(enumerate(differences)), baseline)[2] == word


def test_without_a_common_seed_means_are_compared():
    """Welch by hand: variances 1 / 3 and 2 / 2 of the means, -3 between them."""
    num_pairs, interval, _ = compare({1: 1.0, 2: 2.0, 3: 3.0}, {4: 4.0, 5: 6.0})
    assert num_pairs == 0
    freedom = (1 / 3 + 1) ** 2 / ((1 / 3) ** 2 / 2 + 1)
    half = stats.t.ppf(0.975, freedom) * sqrt(1 / 3 + 1)
    assert (interval.low, interval.high) == pytest.approx((-3 - half, -3 + half))
    assert interval.mean == -3


def test_one_value_on_a_side_says_nothing_about_spread():
    _, interval, word = compare({1: 1.0}, {2: 2.0, 3: 3.0})
    assert (interval.low, interval.high, word) == (-inf, inf, "not shown (one seed)")


def rows(accuracies: dict[int, float | None], rewards: dict[int, float] | None = None) -> list:
    steps = sorted({*accuracies, *(rewards or {})})
    found = []
    for step in steps:
        row: dict = {"step": step}
        if step in accuracies:
            row["eval/accuracy"] = accuracies[step]
        if rewards and step in rewards:
            row["reward/mean"] = rewards[step]
        found.append(row)
    return found


def only_variant(place: Path) -> Variant:
    (variant,) = variants_in(place)
    return variant


def test_the_last_values_of_a_variant(tmp_path):
    write_run(tmp_path / "a", rows({0: 0.1, 5: 0.6, 10: 0.4}), seed=1)
    write_run(tmp_path / "b", rows({0: 0.2, 5: 0.5, 8: 0.9, 10: 0.6}), seed=2)
    found = score(only_variant(tmp_path), "eval/accuracy")
    assert found == ({1: 0.4, 2: 0.6}, [10])
    (columns,) = seed_columns([found[0]])
    # Student with one degree of freedom: 12.7062 times the error of the mean, 0.1.
    assert columns["mean"] == "0.500" and columns["95 % of the mean"] == "-0.771 to 1.771"


def test_a_metric_of_training_is_the_mean_of_its_last_ten_steps(tmp_path):
    rewards = {step: float(step) for step in range(1, 21)}
    write_run(tmp_path / "a", rows({}, rewards))
    (run,) = only_variant(tmp_path).runs
    assert run.last_value("reward/mean") == (20, 15.5)
    assert run.last_value("rollout/entropy") is None


def test_a_last_value_that_was_not_finite_does_not_count(tmp_path):
    write_run(tmp_path / "a", rows({0: 0.1, 10: None}), seed=1)
    write_run(tmp_path / "b", rows({0: 0.2, 10: 0.6}), seed=2)
    found = score(only_variant(tmp_path), "eval/accuracy")
    assert found == ({2: 0.6}, [10])


def test_unfinished_runs_and_repeated_seeds(tmp_path):
    write_run(tmp_path / "a", rows({20: 0.2}), seed=1)
    write_run(tmp_path / "b", rows({20: 0.4}), seed=1)
    write_run(tmp_path / "c", rows({20: 0.8}), seed=2)
    write_run(tmp_path / "d", rows({10: 0.0}), seed=3, finished=False)
    found = score(only_variant(tmp_path), "eval/accuracy")
    assert found[0] == {1: pytest.approx(0.3), 2: 0.8}


def test_the_course_of_a_run_by_hand(tmp_path):
    """Of 2, 4, 4, 4, 5, 5, 7, 9 the mean is 5 and the deviation 2; step 0 is not of the course."""
    values = [1.0, 0.2, 0.4, 0.4, 0.4, 0.5, 0.5, 0.7, 0.9]
    write_run(tmp_path / "a", rows(dict(enumerate(values))))
    (run,) = only_variant(tmp_path).runs
    found = course(run, "eval/accuracy")
    assert found is not None and (found.peak, found.is_collapsed) == (0.9, False)
    assert found.variation == pytest.approx(0.4)
    assert course(run, "eval/pass_at_8") is None


def test_collapses_are_counted_over_runs(tmp_path):
    """Peak 0.8: 0.4 is half of it and no collapse, 0.39 is one; a gap is passed over."""
    write_run(tmp_path / "a", rows({0: 0.1, 5: 0.8, 10: 0.4}), seed=1)
    write_run(tmp_path / "b", rows({0: 0.1, 5: 0.8, 8: None, 10: 0.39}), seed=2)
    write_run(tmp_path / "c", rows({0: 0.1, 5: 0.0, 10: 0.0}), seed=3)
    write_run(tmp_path / "d", rows({0: 0.1, 10: 0.0}), seed=4)
    variant = only_variant(tmp_path)
    table = course_table([variant], "eval/accuracy")
    assert table is not None
    (row,) = table.rows
    # Deviations 0.2 of 0.6 and 0.205 of 0.595; a mean of 0 has no CV, one evaluation no course.
    cv = 100 * (0.2 / 0.6 + 0.205 / 0.595) / 2
    assert row == {
        "method": variant.label,
        "peak": "0.533",
        "CV": f"{cv:.2f} %",
        "collapsed": "1 of 3",
    }
    assert course_table([variant], "eval/pass_at_8") is None


def test_cost_by_hand(tmp_path):
    step = {
        "rollout/response_tokens_mean": 30.0,
        "rollout/num_responses": 8,
        "throughput/discarded_tokens_share": 0.25,
        "time/step_s": 2.0,
    }
    first = [{"step": 0, "time/evaluation_s": 5.0}, {**step, "step": 1}, {**step, "step": 2}]
    first[2]["time/step_s"] = 6.0
    first.append({**step, "step": 3, "time/step_s": 3.0})
    write_run(tmp_path / "a", first, seed=1)
    write_run(tmp_path / "b", [{"step": 1, "time/step_s": 5.0}], seed=2)
    assert cost(only_variant(tmp_path)) == {
        "steps": 2,
        "response tokens": 3 * 240,
        "sampled tokens": 3 * 320,
        "training [s]": (11 + 5) / 2,
        "evaluation [s]": 5,
        "median step [s]": (3 + 5) / 2,
    }
