"""The built wheel is complete: settings and code work with nothing of the source tree in reach."""

import subprocess
import sys
import zipfile

import pytest

from megatron_rl.config.load import conf_dir
from tests.launch import REPO

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import megatron_rl
assert megatron_rl.__file__.startswith(sys.argv[1]), megatron_rl.__file__
from megatron_rl.config.load import compose, conf_dir
assert str(conf_dir()).startswith(sys.argv[1]), conf_dir()
from megatron_rl.config.method import load_method
print("method:", load_method("grpo").name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, because a build writes build/ and egg-info beside setup.py."""
    source = tmp_path_factory.mktemp("source")
    for name in ("megatron_rl", "conf", "setup.py", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(REPO / name), str(source)], check=True)
    out = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--use-pep517",
        "-w",
        out,
        source,
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_every_settings_file_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"megatron_rl/conf/{path.relative_to(conf_dir())}" for path in conf_dir().rglob("*.yaml")
    }
    assert len(wanted) > 10
    assert wanted <= names, wanted - names


def test_every_module_is_inside_and_nothing_else(wheel):
    names = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name and not name.startswith("megatron_rl/conf/")
    }
    files = (REPO / "megatron_rl").rglob("*.py")
    assert names == {str(path.relative_to(REPO)) for path in files}


@pytest.mark.full
def test_a_method_loads_from_the_wheel_alone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "method: grpo"
