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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"step": 1', "line 1 is not JSON"),
        ('{"step": null}', r"line 1 is {\"step\": null}; a row has its step, an integer"),
        ('{"step": true}', "a row has its step"),
        ('{"a": 1}', "a row has its step"),
        ("[1]", "a row has its step"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, line, says):
    with pytest.raises(ValueError, match=says) as error:
        read_metrics(written(tmp_path, f'{line}\n{{"step": 2}}\n'))
    assert str(tmp_path) in str(error.value)


def test_damage_is_named_by_its_line_and_its_file(tmp_path):
    file = written(tmp_path, '{"step": 1}\n\n{"step"\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3 is not JSON"):
        read_metrics(file)
    file.write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(file)


def test_a_damaged_last_line_that_was_written_to_its_end_is_no_cut_off_one(tmp_path):
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(written(tmp_path, '{"step": 1}\n{"step"\n'))
