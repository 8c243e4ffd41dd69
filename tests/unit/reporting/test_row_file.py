"""Rows that a run is going to overwrite are archived; damage is named before anything is lost."""

import json

import pytest

from megatron_rl.reporting.metrics_file import archive_rows, check_rows, read_metrics


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


def test_rows_after_the_step_are_added_to_an_archive(tmp_path):
    path = write(tmp_path / "metrics.jsonl", 0, 1, 2, 3, 4)
    archive = archive_rows(path, 2)
    assert archive == tmp_path / "metrics.overwritten.jsonl"
    assert steps(archive) == [3, 4] and steps(path) == [0, 1, 2]
    assert archive_rows(path, 2) is None
    write(path, 0, 1, 2, 3)
    assert archive_rows(path, 2) == archive
    assert steps(archive) == [3, 4, 3] and steps(path) == [0, 1, 2]
    assert {file.name for file in tmp_path.iterdir()} == {archive.name, path.name}


def test_a_line_that_a_kill_cut_off_is_no_damage_and_goes_with_them(tmp_path):
    path = write(tmp_path / "samples.jsonl", 1, 2, end='{"step": 3, "te')
    check_rows(path)
    archive = archive_rows(path, 2)
    assert steps(path) == [1, 2] and archive is not None
    assert archive.read_text() == '{"step": 3, "te\n'


def test_nothing_there(tmp_path):
    check_rows(tmp_path / "none.jsonl")
    assert archive_rows(tmp_path / "none.jsonl", 3) is None


@pytest.mark.parametrize(
    "line",
    [b"\x00\x00", b"[1]", b'{"a": 1}', b'{"step": "3"}', b'{"step": true}', b'{"step": 3', b"\xff"],
)
def test_damage_is_named_with_its_line_and_a_remedy(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    for end in (b'\n{"step": 3}\n', b"\n"):  # with a line break it is no line that was cut off
        content = b'{"step": 1}\n\n' + line + end
        path.write_bytes(content)
        for action in (check_rows, read_metrics, lambda file: archive_rows(file, 1)):
            with pytest.raises(
                ValueError, match=r"metrics.jsonl: line 3 is damaged .*move the file away"
            ):
                action(path)
        assert path.read_bytes() == content
