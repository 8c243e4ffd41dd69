"""Reading metrics.jsonl: which rows count, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.reporting.metrics_file import read_metrics, series


def written(folder: Path, text: str) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_last_row_of_a_step_counts_and_a_cut_off_line_does_not(tmp_path):
    text = '{"step": 2, "a": 1}\n\n{"step": 1, "a": null}\n{"step": 2, "a": 3.5}\n{"step": 3, "a'
    rows = read_metrics(written(tmp_path, text))
    assert rows == [{"step": 1, "a": None}, {"step": 2, "a": 3.5}]
    assert series(rows, "a") == ([2], [3.5])


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file; give the metrics"):
        read_metrics(tmp_path / "gone.jsonl")
