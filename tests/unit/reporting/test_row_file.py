"""Rows that a run is going to repeat are kept aside; damage is named before anything is lost."""

import json

import pytest

from megatron_rl.reporting.row_file import check_rows, set_aside


def write(path, *steps, end=""):
    path.write_text(
        "".join(
            json.dumps({"step": step, "text": "a\u2028b"}, ensure_ascii=False) + "\n"
            for step in steps
        )
        + end
    )
    return path


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().split("\n") if line]


def test_rows_after_the_step_move_into_a_file_of_their_own_each_time(tmp_path):
    path = write(tmp_path / "metrics.jsonl", 0, 1, 2, 3, 4)
    first = set_aside(path, 2)
    assert (
        first == tmp_path / "metrics.from-step-3.1.jsonl"
        and steps(first) == [3, 4]
        and steps(path) == [0, 1, 2]
    )
    assert set_aside(path, 2) is None
    write(path, 0, 1, 2, 3)
    second = set_aside(path, 2)
    assert (
        second == tmp_path / "metrics.from-step-3.2.jsonl"
        and steps(second) == [3]
        and steps(first) == [3, 4]
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "metrics.from-step-3.1.jsonl",
        "metrics.from-step-3.2.jsonl",
        path.name,
    ]


def test_a_line_that_a_kill_cut_off_is_no_damage_and_goes_with_them(tmp_path):
    path = write(tmp_path / "samples.jsonl", 1, 2, end='{"step": 3, "te')
    check_rows(path)
    aside = set_aside(path, 2)
    assert steps(path) == [1, 2] and aside is not None and aside.read_text() == '{"step": 3, "te'


def test_nothing_there(tmp_path):
    check_rows(tmp_path / "none.jsonl")
    assert set_aside(tmp_path / "none.jsonl", 3) is None


@pytest.mark.parametrize(
    "line", ["\x00\x00\x00", "[1]", '{"reward": 1}', '{"step": "3"}', '{"step": 3']
)
def test_damage_is_named_with_its_line_and_a_remedy(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    for action in (lambda: check_rows(path), lambda: set_aside(path, 1)):
        with pytest.raises(
            ValueError, match=r"metrics.jsonl: line 2 is damaged .*move the file away"
        ):
            action()
    assert path.read_text().count("\n") == 3
