"""Wheels in parts: what is joined is what was packed, and damage is named."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPO

SCRIPT = REPO / "tools/bench/pack_wheels.py"
SPEC = importlib.util.spec_from_file_location("pack_wheels", SCRIPT)
pack_wheels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pack_wheels)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    draw = random.Random(0)
    for name, size in {"a.whl": 2500, "b.whl": 0, "c.whl": 1, "d.whl": 499}.items():
        (folder / name).write_bytes(draw.randbytes(size))
    return folder


@pytest.mark.parametrize(("part", "count"), [(1000, 3), (1, 3000), (3000, 1), (7, 429)])
def test_parts_of_any_size_give_the_files_back(wheels, tmp_path, part, count):
    parts = pack_wheels.pack(wheels, tmp_path / "parts", part)
    assert len(parts) == count and all(path.stat().st_size <= part for path in parts)
    pack_wheels.join(tmp_path / "parts", tmp_path / "back")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        p.name: p.read_bytes() for p in wheels.iterdir()
    }


def test_damage_and_loss_are_named_before_anything_is_written(wheels, tmp_path):
    parts = pack_wheels.pack(wheels, tmp_path / "parts", 1000)
    parts[0].write_bytes(bytes([parts[0].read_bytes()[0] ^ 1]) + parts[0].read_bytes()[1:])
    parts[2].unlink()
    with pytest.raises(ValueError, match="missing or damaged: part_000, part_002; copy them again"):
        pack_wheels.join(tmp_path / "parts", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_nothing_to_pack_and_a_used_folder_are_refused(wheels, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file in it"):
        pack_wheels.pack(tmp_path / "empty", tmp_path / "parts", 10)
    with pytest.raises(ValueError, match="not empty"):
        pack_wheels.pack(wheels, wheels, 10)


def test_the_command_needs_python_alone(wheels, tmp_path):
    for source, target, command in (
        (wheels, "parts", "pack"),
        (tmp_path / "parts", "back", "join"),
    ):
        subprocess.run(
            [sys.executable, "-I", "-S", SCRIPT, command, source, tmp_path / target],
            check=True,
            timeout=60,
            cwd=tmp_path,
        )
    assert (tmp_path / "back/a.whl").read_bytes() == (wheels / "a.whl").read_bytes()
    used = [sys.executable, "-I", "-S", SCRIPT, "pack", wheels, tmp_path / "parts"]
    again = subprocess.run(used, capture_output=True, text=True, timeout=60)
    assert (
        again.returncode == 1
        and again.stderr.startswith("error: ")
        and "Traceback" not in again.stderr
    )
