"""Which runs form a variant, and how variants are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.made_runs import curve_rows, variants_in, write_grid, write_run
from tools.reporting.variants import choose_baseline


def labels_and_seeds(place: Path) -> dict[str, tuple[int, ...]]:
    variants = variants_in(place)
    return {each.label: tuple(sorted({run.seed for run in each.runs})) for each in variants}


def setting(section: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one setting in ``config.json``."""

    def change(content: dict[str, Any]) -> None:
        content[section][key] = value

    return change


def test_seeds_of_one_method_are_a_variant(tmp_path):
    write_grid(tmp_path, [["method=grpo"], ["method=dapo"]], [2, 1], num_steps=5)
    assert labels_and_seeds(tmp_path) == {"method=grpo": (1, 2), "method=dapo": (1, 2)}


def test_a_label_has_only_what_tells_variants_apart(tmp_path):
    overrides = [
        ["method=a_grae", "method.shaping.ass.alpha=0.5"],
        ["method=a_grae", "method.shaping.ass.alpha=0.7"],
        ["method=grpo"],
    ]
    write_grid(tmp_path, overrides, [1], num_steps=5)
    # grpo differs from the others in its shaping too; its name says that already.
    assert list(labels_and_seeds(tmp_path)) == [
        "method=a_grae alpha=0.5",
        "method=a_grae alpha=0.7",
        "method=grpo",
    ]


def test_one_method_is_not_repeated_in_labels(tmp_path):
    rates = [[f"optim.learning_rate={rate}"] for rate in ("1e-6", "2e-6")]
    write_grid(tmp_path, rates, [1], num_steps=5)
    assert list(labels_and_seeds(tmp_path)) == ["learning_rate=1e-06", "learning_rate=2e-06"]


def test_long_values_are_cut_and_stay_apart(tmp_path):
    for number in (1, 2):
        text = f"{'think step by step and then '}{number}"
        change = setting("data", "prompt_suffix", text)
        write_run(tmp_path / str(number), curve_rows(1, 2), change=lambda c, f=change: both(c, f))
    labels = list(labels_and_seeds(tmp_path))
    assert len(set(labels)) == 2
    assert all(label.startswith("prompt_suffix=think_step_by_step") for label in labels)
    assert all(len(label) < 50 and " " not in label for label in labels)


def both(content: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    """The change of a record whose prompts have other content, too."""
    change(content)
    content["data_fingerprint"] = content["data"]["prompt_suffix"]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("parallel", "tensor", 4), ("logging", "trackers", ["wandb"]), ("checkpoint", "keep", 9)],
)
def test_what_does_not_train_does_not_part_seeds(tmp_path, section, key, value):
    write_run(tmp_path / "a", curve_rows(1, 2), seed=1)
    write_run(tmp_path / "b", curve_rows(2, 2), seed=2, change=setting(section, key, value))
    assert labels_and_seeds(tmp_path) == {"method=grpo": (1, 2)}


@pytest.mark.parametrize(
    ("section", "key", "value", "label"),
    [
        ("trainer", "num_steps", 30, "num_steps=30"),
        ("evaluation", "temperature", 0.6, "temperature=0.6"),
        ("evaluation", "num_prompts", 8, "num_prompts=8"),
        ("data", "eval", "other.jsonl", "eval=other.jsonl"),
        ("batch", "prompts_per_step", 32, "prompts_per_step=32"),
    ],
)
def test_what_trains_or_is_measured_parts_runs(tmp_path, section, key, value, label):
    write_run(tmp_path / "a", curve_rows(1, 2), seed=1)
    write_run(tmp_path / "b", curve_rows(2, 2), seed=2, change=setting(section, key, value))
    found = labels_and_seeds(tmp_path)
    assert sorted(found.values()) == [(1,), (2,)]
    assert label in found


def test_a_repeated_seed_is_parted_by_what_else_differs(tmp_path):
    """The same training in two layouts is a comparison of layouts."""
    write_run(tmp_path / "a", curve_rows(1, 2), seed=1)
    write_run(tmp_path / "b", curve_rows(2, 2), seed=2)
    write_run(tmp_path / "c", curve_rows(1, 2), seed=1, change=setting("parallel", "tensor", 1))
    assert labels_and_seeds(tmp_path) == {"tensor=2": (1, 2), "tensor=1": (1,)}


def test_a_seed_that_ran_twice_stays_one_variant(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, curve_rows(1, 2), seed=1)
    (variant,) = variants_in(tmp_path)
    assert (variant.repeated_seeds, len(variant.runs)) == ((1,), 2)


def test_unfinished_runs_count_where_there_are_no_others(tmp_path):
    write_run(tmp_path / "a", curve_rows(1, 4), seed=1, num_steps=4)
    write_run(tmp_path / "b", curve_rows(2, 4)[:3], seed=2, num_steps=4, finished=False)
    (variant,) = variants_in(tmp_path)
    assert [run.name for run in variant.counted] == ["a"]
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (variant,) = variants_in(tmp_path)
    assert [run.name for run in variant.counted] == ["b"] and not variant.has_finished


def test_the_baseline(tmp_path):
    write_grid(tmp_path, [["method=dapo"], ["method=grpo"], ["method=rloo"]], [1], num_steps=5)
    variants = variants_in(tmp_path)
    assert choose_baseline(variants, None).label == "method=grpo"
    assert choose_baseline(variants, "method=rloo").label == "method=rloo"
    assert choose_baseline(variants[::2], None).label == "method=dapo"  # no grpo: the first
    with pytest.raises(ValueError, match=r"(?s)--baseline 'ppo': no variant .*\n  - method=rloo$"):
        choose_baseline(variants, "ppo")


def test_a_baseline_by_some_of_its_words(tmp_path):
    rates = ("1e-6", "2e-6")
    grid = [
        [f"method={name}", f"optim.learning_rate={rate}"]
        for name in ("grpo", "dapo")
        for rate in rates
    ]
    write_grid(tmp_path, grid, [1], num_steps=5)
    variants = variants_in(tmp_path)
    chosen = choose_baseline(variants, "learning_rate=2e-06 method=dapo")
    assert chosen.label == "method=dapo learning_rate=2e-06"
    with pytest.raises(ValueError, match="several variants have these words"):
        choose_baseline(variants, "method=dapo")
