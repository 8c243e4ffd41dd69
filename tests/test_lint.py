"""ruff finds nothing (rules in .ruff.toml)."""

import subprocess
import sys

from tests.launch import REPO


def ruff(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPO)


def test_ruff_is_content():
    done = ruff(".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_can_find_something(tmp_path):
    (tmp_path / "bad.py").write_text("import os\ntry:\n    f()\nexcept Exception:\n    pass\n")
    done = ruff("--config", str(REPO / ".ruff.toml"), str(tmp_path / "bad.py"))
    assert done.returncode == 1
    assert "F401" in done.stdout
    assert "BLE001" in done.stdout
