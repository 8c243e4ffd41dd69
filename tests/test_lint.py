"""ruff finds nothing and would format nothing otherwise (rules in .ruff.toml)."""

import subprocess
import sys

from tests.launch import REPO


def ruff(command: str, *args: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "ruff", command, "--no-cache", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=REPO)


def test_ruff_is_content():
    done = ruff("check", "--output-format", "concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_formatted():
    done = ruff("format", "--check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_can_find_something(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\ntry:\n    f()\nexcept Exception:\n    pass\n")
    done = ruff("check", "--config", str(REPO / ".ruff.toml"), str(bad))
    assert done.returncode == 1
    assert "F401" in done.stdout
    assert "BLE001" in done.stdout


def test_the_format_can_be_wrong(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("x = {'a':1}\n")
    assert ruff("format", "--check", "--config", str(REPO / ".ruff.toml"), str(bad)).returncode == 1
