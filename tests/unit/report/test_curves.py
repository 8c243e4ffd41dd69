"""Values over steps, panels and what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_rl.reporting.figure import Curve, curve_of, moving_mean, smoothing_width
from megatron_rl.reporting.panels import OVER_K
from tests.unit.report.made_runs import curve_rows, variants_in, write_run
from tools.reporting.figures import band_of, draw_bands, draws_of, style_of, variant_band
from tools.reporting.variants import Variant

NAN = float("nan")
ACCURACY = "eval/accuracy"


def same(found: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-12)


def keys_of(variants: list[Variant]) -> list[str]:
    return [panel.key for panel in draws_of(variants, 1)]


def test_a_value_that_is_missing_or_null_is_a_gap(tmp_path):
    rows = [
        {"step": 0, ACCURACY: 0.1},
        {"step": 1, "reward/mean": 1.0},
        {"step": 2, "reward/mean": None, ACCURACY: None},
        {"step": 3},
        {"step": 4, "reward/mean": 4.0, ACCURACY: 0.0},
    ]
    write_run(tmp_path / "a", rows)
    (variant,) = variants_in(tmp_path)
    training = curve_of(rows, "reward/mean")
    same(training.x, [1, 2, 3, 4])
    same(training.y, [1, NAN, NAN, 4])
    held_out = curve_of(rows, ACCURACY)  # most steps have no evaluation
    same(held_out.x, [0, 2, 4])
    same(held_out.y, [0.1, NAN, 0.0])
    assert variant_band(variant, "rollout/entropy", 1) is None


def test_median_and_band_are_of_the_runs_that_have_the_step():
    curves = [
        Curve(np.array([1.0, 2, 3]), np.array([1.0, NAN, 9])),
        Curve(np.array([1.0, 2, 3]), np.array([4.0, NAN, 1])),
        Curve(np.array([1.0, 4]), np.array([2.0, 5])),
    ]
    band = band_of(curves)
    same(band.x, [1, 2, 3, 4])
    same(band.median, [2, NAN, 5, 5])
    same(band.low, [1, NAN, 1, 5])
    same(band.high, [4, NAN, 9, 5])


def test_a_moving_mean_passes_over_gaps_and_keeps_them():
    same(moving_mean(np.array([0.0, 3, 6, 0]), 2), [1.5, 3, 3, 3])
    same(moving_mean(np.array([0.0, NAN, 6, 0]), 2), [0, NAN, 3, 3])
    same(moving_mean(np.array([5.0, 1]), 1), [5, 1])
    same(moving_mean(np.array([1.0]), 10), [1])


def test_only_curves_of_training_are_smoothed(tmp_path):
    write_run(tmp_path / "a", curve_rows(1, 60), num_steps=60)
    variants = variants_in(tmp_path)
    assert [smoothing_width(steps) for steps in (1, 60)] == [1, 3]
    reward = variant_band(variants[0], "reward/mean", 3)
    accuracy = variant_band(variants[0], ACCURACY, 3)
    raw = curve_of(variants[0].runs[0].rows, "reward/mean")
    assert reward is not None and reward.raw is not None and accuracy is not None
    same(reward.raw.y, raw.y.tolist())
    assert reward.median[1] == pytest.approx(raw.y[:3].mean())
    same(accuracy.median, curve_of(variants[0].runs[0].rows, ACCURACY).y.tolist())
    assert accuracy.raw is None


def test_pass_at_k_is_that_of_the_evaluation_after_the_training(tmp_path):
    rows = [{"step": 1, "eval/pass_at_1": 0.2, "eval/pass_at_4": 0.4}]
    run = write_run(tmp_path / "a", rows)
    (variant,) = variants_in(tmp_path)
    band = variant_band(variant, OVER_K, 1)
    assert band is not None
    assert (band.x.tolist(), band.median.tolist()) == ([1, 4], [0.2, 0.4])
    (run / "evaluation").mkdir()
    (run / "evaluation" / "metrics.jsonl").write_text(
        '{"step": 0, "eval/pass_at_1": 0.0, "eval/pass_at_8": 0.1}\n'
        '{"step": 1, "eval/pass_at_1": 0.3, "eval/pass_at_8": 0.7, "eval_low/pass_at_8": 0.6}\n'
    )
    (variant,) = variants_in(tmp_path)
    band = variant_band(variant, OVER_K, 1)
    assert band is not None
    assert (band.x.tolist(), band.median.tolist()) == ([1, 8], [0.3, 0.7])
    # Over training too, for the k that it has.
    keys = ["eval/pass_at_1", "eval/pass_at_4", "eval/pass_at_8"]
    assert keys_of([variant]) == [*keys, OVER_K]
    curves = [curve_of(variant.runs[0].rows_of(key), key) for key in keys]
    assert [curve.x.tolist() for curve in curves] == [[0, 1], [1], [0, 1]]
    assert [curve.y.tolist() for curve in curves] == [[0.0, 0.3], [0.4], [0.1, 0.7]]
    assert variant.runs[0].last_value("eval/pass_at_8") == (1, 0.7)
    write_run(tmp_path / "a", [{"step": 1, "eval/pass_at_1": 0.2}])
    (run / "evaluation" / "metrics.jsonl").write_text('{"step": 1, "eval/pass_at_1": 0.3}\n')
    (variant,) = variants_in(tmp_path)
    assert variant_band(variant, OVER_K, 1) is None


def test_panels_are_those_of_which_there_is_a_value(tmp_path):
    write_run(tmp_path / "a", [{"step": 1, "reward/mean": 1.0, "rollout/entropy": None}])
    assert keys_of(variants_in(tmp_path)) == ["reward/mean"]


def test_panels_of_data_sources_and_of_some_k(tmp_path):
    row = {f"eval/pass_at_{2**power}": 0.1 * power for power in range(9)}
    row |= {ACCURACY: 0.5, "eval/accuracy/b": 0.1, "eval/accuracy/a/b": 0.2}
    row |= {"eval_low/accuracy/b": 0.0, "eval/pass_at_4/b": 0.3}
    write_run(tmp_path / "a", [{"step": 1, **row}])
    keys = keys_of(variants_in(tmp_path))
    assert keys == [
        ACCURACY,
        "eval/accuracy/a/b",
        "eval/accuracy/b",
        *(f"eval/pass_at_{k}" for k in (1, 8, 32, 256)),
        OVER_K,
    ]


def test_panels_that_would_say_nothing_are_left_out(tmp_path):
    row = {
        "step": 1,
        "reward/mean": 0.5,
        "reward/accuracy": 0.5,
        ACCURACY: 0.5,
        "eval/pass_at_1": 0.5,
        "policy/clip_up_positive_share": 0.0,
        "policy/clip_up_negative_share": 0.0,
    }
    run = write_run(tmp_path / "a", [row])
    keys = keys_of(variants_in(tmp_path))
    assert keys == [ACCURACY, "reward/mean", "policy/clip_up_positive_share"]
    changed = {"reward/accuracy": 0.4, "eval/pass_at_1": 0.6, "policy/clip_up_negative_share": 0.1}
    write_run(run, [row | changed])
    more = set(keys_of(variants_in(tmp_path)))
    assert more - set(keys) == set(changed)


def drawn_lines(values: list[list[float]]) -> list:
    """The lines of one variant with these runs."""
    x = np.arange(float(len(values[0])))
    band = band_of([Curve(x, np.array(run)) for run in values])
    axes = Figure().subplots()
    draw_bands(axes, [band], held_out=True)
    return axes.lines


def test_what_is_drawn_is_the_median_with_its_gaps():
    lines = drawn_lines([[0.0, 1, NAN, 3, NAN], [2.0, 3, NAN, 5, NAN]])
    same(lines[-1].get_ydata(), [1, 2, NAN, 4, NAN])
    same(lines[-2].get_xdata(), [3])  # alone between gaps: a point, since a line has no length
    same(lines[-2].get_ydata(), [4])
    same(lines[0].get_ydata(), [0, 1, NAN, 3, NAN])
    assert lines[0].get_alpha() < 0.5


def test_styles_tell_two_dozen_variants_apart_without_color_or_without_dash():
    styles = [style_of(order) for order in range(25)]
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 25
    assert len({style["marker"] for style in styles[:12]}) == 12
    assert len({style["color"] for style in styles[:7]}) == 7
