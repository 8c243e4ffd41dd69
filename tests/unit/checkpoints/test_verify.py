"""tools/verify_checkpoint.py: a line for each damaged file, and what the exit code says."""

from __future__ import annotations

import pytest

from megatron_rl.checkpoints import directory
from tools.verify_checkpoint import main


@pytest.fixture
def root(tmp_path):
    for step in (1, 2):
        partial = directory.begin(directory.step_path(tmp_path, step))
        for name in ("a.distcp", "b.distcp", "common.pt"):
            (partial / name).write_bytes(name.encode() * 100)
        directory.finish(directory.step_path(tmp_path, step), {"step": step})
    return tmp_path


def change_one_bit(path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def test_whole_checkpoints_are_a_line_each(root, capsys):
    assert main([str(root)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{root}/step_000001: whole, 3 files, ")
    assert first.endswith("sizes and digests agree") and "step_000002" in second


def test_every_damaged_file_is_a_line(root, capsys):
    path = root / "step_000002"
    change_one_bit(path / "a.distcp")
    change_one_bit(path / "common.pt")
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: a.distcp is not what was written (its digest differs)",
        f"{path}: common.pt is not what was written (its digest differs)",
    ]
    assert main(["--sizes-only", str(path)]) == 0
    assert capsys.readouterr().out.endswith("sizes agree\n")
    assert main([str(root)]) == 1, "one damaged of two"


def test_missing_and_cut_files_are_all_named(root, capsys):
    path = root / "step_000001"
    (path / "a.distcp").unlink()
    (path / "b.distcp").write_bytes(b"b")
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: a.distcp is missing",
        f"{path}: b.distcp has 1 bytes, 800 were written",
    ]
    (path / "manifest.json").write_text("{")
    (root / "step_000002" / "manifest.json").unlink()
    assert main([str(root)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: manifest.json cannot be read",
        f"{root}/step_000002: no manifest.json (not a checkpoint, or its writer was stopped)",
    ]


@pytest.mark.parametrize("name", ["", "absent"])
def test_nothing_to_look_at_is_an_error(tmp_path, capsys, name):
    assert main([str(tmp_path / name)]) == 2
    assert "is no checkpoint and holds none" in capsys.readouterr().err
