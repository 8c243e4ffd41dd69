"""Runs are found by their files; what cannot be read is named."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.report.made_runs import curve_rows, found_in, record, write_run


def test_runs_at_any_depth_in_the_order_of_their_numbers(tmp_path):
    for name in ("b/seed-10", "b/seed-2", "a"):
        write_run(tmp_path / name, curve_rows(1, 2))
    found = found_in(tmp_path)
    assert [run.name for run in found.runs] == ["a", "b/seed-2", "b/seed-10"]
    assert found.problems == []
    # The folder of a run itself, and the same one twice.
    again = found_in(tmp_path / "a", tmp_path)
    assert [run.name for run in again.runs] == ["a", "b/seed-2", "b/seed-10"]


def test_models_and_what_lies_below_a_run_are_no_runs(tmp_path):
    run = write_run(tmp_path / "run", curve_rows(1, 2))
    write_run(run / "copy", curve_rows(2, 2))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert [run.name for run in found_in(tmp_path).runs] == ["run"]


def test_steps_and_state(tmp_path):
    whole = write_run(tmp_path / "whole", curve_rows(1, 4), num_steps=4, finished=False)
    killed = write_run(tmp_path / "killed", curve_rows(1, 4)[:3], num_steps=4, finished=False)
    # evaluation.stop_after ends a run before its last step; the figure is the last that it writes.
    stopped = write_run(tmp_path / "stopped", curve_rows(1, 4)[:3], num_steps=4)
    waiting = write_run(tmp_path / "waiting", curve_rows(1, 4)[:3], num_steps=4)
    (waiting / "requeue").write_text("2\n")
    # Finished after two steps, made longer, and killed: the figure is of its first end.
    rows = curve_rows(1, 4)[:4]
    longer = write_run(
        tmp_path / "longer", rows, num_steps=4, overrides=["evaluation.stop_after=null"]
    )
    states = {
        run.folder: (run.steps_done, run.steps_wanted, run.finished)
        for run in found_in(tmp_path).runs
    }
    assert states == {
        whole: (4, 4, True),
        killed: (2, 4, False),
        stopped: (2, 4, True),
        waiting: (2, 4, False),
        longer: (3, 4, False),
    }


def test_damaged_files_are_named_and_the_others_read(tmp_path):
    write_run(tmp_path / "good", curve_rows(1, 2))
    write_run(tmp_path / "rows", curve_rows(1, 2))
    (tmp_path / "rows" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 2}\n')
    write_run(tmp_path / "settings", curve_rows(1, 2))
    (tmp_path / "settings" / "config.json").write_text('{"seed": 1')
    write_run(tmp_path / "words", [{"step": 1, "reward/mean": "high"}])
    write_run(tmp_path / "started", [])
    write_run(tmp_path / "lost", [])
    (tmp_path / "lost" / "metrics.jsonl").unlink()
    write_run(tmp_path / "foreign", curve_rows(1, 2), change=lambda content: content.pop("seed"))
    asked = write_run(tmp_path / "asked", curve_rows(1, 2)) / "evaluation"
    asked.mkdir()
    (asked / "metrics.jsonl").write_text("[1]\n")
    found = found_in(tmp_path)
    assert [run.name for run in found.runs] == ["asked", "good"]
    said = {problem.partition(":")[0]: problem for problem in found.problems}
    assert sorted(said) == ["asked", "foreign", "lost", "rows", "settings", "started", "words"]
    assert "its evaluation is not shown" in said["asked"]
    assert "line 2 is damaged" in said["rows"]
    assert "config.json is damaged" in said["settings"]
    assert "has no row yet" in said["started"]
    assert "no such file" in said["lost"]
    assert "lacks seed" in said["foreign"]
    assert "reward/mean of step 1 is 'high', no number" in said["words"]


def test_numbers_that_are_not_finite_are_missing(tmp_path):
    run = write_run(tmp_path / "run", curve_rows(1, 2))
    (run / "metrics.jsonl").write_text('{"step": 1, "a": NaN, "b": Infinity, "c": null, "d": 1}\n')
    (only,) = found_in(tmp_path).runs
    assert only.rows == [{"step": 1, "a": None, "b": None, "c": None, "d": 1}]


def test_nothing_to_read_is_one_error_with_the_reasons(tmp_path):
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}: no run that can be read"):
        found_in(tmp_path)
    write_run(tmp_path / "started", [])
    with pytest.raises(ValueError, match=r"(?s)no run that can be read.*started: left out: "):
        found_in(tmp_path)
    with pytest.raises(ValueError, match="gone: no such folder; give folders that hold runs"):
        found_in(tmp_path / "gone")


def test_an_evaluation_after_the_training_belongs_to_its_run(tmp_path):
    run = write_run(tmp_path / "run", curve_rows(1, 2))
    (run / "evaluation").mkdir()
    (run / "evaluation" / "config.json").write_text(json.dumps(record()))
    later = {"step": 2, "eval/accuracy": 0.5, "eval/maj_at_9": 0.6, "eval/pass_at_8": 0.7}
    (run / "evaluation" / "metrics.jsonl").write_text(json.dumps(later) + "\n")
    (only,) = found_in(tmp_path).runs
    assert only.evaluation == [later]
    assert only.rows_of("eval/accuracy") == only.rows == curve_rows(1, 2)
    for key in ("eval/pass_at_8", "eval/maj_at_9"):
        assert only.rows_of(key) == [later]
