"""Dockerfile.ngc: hadolint is content, what it copies exists, and its pins are those of setup.py. It is not built here."""

import re
import subprocess
import sys
from pathlib import Path

from tests.launch import REPO
from tests.packaging.test_setup import dependencies

DOCKERFILE = REPO / "Dockerfile.ngc"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_hadolint_is_content():
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_hadolint_can_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN cd /x && apt-get install curl\n")
    assert hadolint(tmp_path / "Dockerfile").returncode == 1


def test_copied_files_exist():
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    sources = [name for line in copies for name in line.split()]
    assert "megatron_rl" in sources
    assert [name for name in sources if not (REPO / name).exists()] == []


def test_pins_are_those_of_setup():
    pins = re.findall(r"\b([\w-]+==[\d.]+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert any(pin.startswith("megatron-core==") for pin in pins)
    assert set(pins) <= set(dependencies()["cpu"])


def test_the_base_image_can_be_chosen():
    """The ARG stands before the first FROM, and every stage starts from it (or from an earlier stage)."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if re.match(r"(ARG|FROM) ", line)]
    assert lines[0].startswith("ARG BASE_IMAGE=")
    assert all(line.split()[1] == "${BASE_IMAGE}" for line in lines if line.startswith("FROM"))
