"""pass@k, figure and report."""

from __future__ import annotations

import itertools
import json

import pytest
from matplotlib.image import imread

from megatron_rl.reporting.evaluation import pass_at_k
from megatron_rl.reporting.figure import draw_curves
from megatron_rl.reporting.report import report, table


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(num_correct, k):
    subsets = list(itertools.combinations([True] * num_correct + [False] * (6 - num_correct), k))
    assert pass_at_k(6, num_correct, k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets), abs=1e-12
    )


def test_pass_at_k_by_hand_and_out_of_range():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of 6 pairs hold the right one
    assert pass_at_k(2000, 1, 1000) == 0.5
    for k in (0, 5):
        with pytest.raises(
            ValueError, match=rf"evaluation\.pass_at = {k}: must lie within 1 and the 4"
        ):
            pass_at_k(4, 1, k)


def write_metrics(path, num_steps=12, **more):
    rows = [{"step": 0, "eval/accuracy": 0.25}]
    rows += [
        {"step": step, "reward/mean": step / 10, "optim/grad_norm": 1.0, "time/step_s": 0.5, **more}
        for step in range(1, num_steps)
    ]
    rows[-1]["eval/accuracy"] = 0.75
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_report_names_first_last_and_change(tmp_path):
    text = report(write_metrics(tmp_path / "metrics.jsonl"))
    line = next(line for line in text.splitlines() if line.startswith("held-out accuracy"))
    assert line.split() == ["held-out", "accuracy", "25.0%", "@", "0", "75.0%", "@", "11", "+50.0%"]
    assert "gradient norm" in text and "entropy" not in text
    (tmp_path / "empty.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="none of the metrics"):
        report(tmp_path / "empty.jsonl")


def test_report_says_what_was_not_finite_and_how_many_steps_were_skipped(tmp_path):
    path = write_metrics(tmp_path / "metrics.jsonl", **{"optim/skipped": 0})
    assert "skipped optimizer steps 0" in [
        " ".join(line.split()) for line in report(path).splitlines()
    ]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[4:]:
        row.update({"optim/grad_norm": None, "optim/skipped": 2})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = {line.split("  ")[0]: line.split() for line in report(path).splitlines()}
    assert lines["gradient norm"] == "gradient norm 1.000 @ 1 not finite @ 11".split()
    assert (
        lines["skipped optimizer steps"]
        == "skipped optimizer steps first @ 4 16, last @ 11".split()
    )


@pytest.mark.parametrize(
    ("shares", "line"),
    [([0.0, 0.0], "mean 0.0%"), ([0.0, 0.5, 0.25], "mean 25.0% most 50.0% @ 2"), ([], None)],
)
def test_report_says_how_many_responses_had_no_verdict(tmp_path, shares, line):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "eval/accuracy": 0.25}]
    rows += [{"step": step, "reward/excluded_share": x} for step, x in enumerate(shares, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "responses without a verdict"
    found = [" ".join(one.split()) for one in report(path).splitlines() if one.startswith(head)]
    assert found == ([] if line is None else [f"{head} {line}"])


def test_table_is_aligned():
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\n-------\nccc   d"


def test_a_figure_shows_the_panels_a_run_has(tmp_path):
    """More metrics draw a larger figure with more ink in it; nothing to draw is an error."""
    more = {
        "rollout/entropy": 0.5,
        "kl/reference_mean": 0.1,
        "throughput/response_tokens_per_s": 9.0,
    }
    images = []
    for out, extra in ((tmp_path / "small.png", {}), (tmp_path / "deep" / "large.png", more)):
        draw_curves(write_metrics(tmp_path / "metrics.jsonl", **extra), out)
        images.append(imread(out))
    small, large = images
    assert large.shape[0] > small.shape[0]
    assert (large[..., :3] < 0.5).sum() > 1.3 * (small[..., :3] < 0.5).sum()
    for text in ("", '{"step": 0}\n'):
        (tmp_path / "empty.jsonl").write_text(text)
        with pytest.raises(ValueError, match="none of the metrics of the figure"):
            draw_curves(tmp_path / "empty.jsonl", tmp_path / "no.png")
