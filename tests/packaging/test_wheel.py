"""The built wheel is complete: settings and code work with nothing of the source tree in reach."""

import site
import subprocess
import sys
import zipfile

import pytest

from megatron_rl.config.load import conf_dir
from tests.e2e.toy import overrides, write_data, write_model
from tests.launch import REPO, run

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
    files = (REPO / "megatron_rl").rglob("*")
    kept = [path for path in files if path.suffix in (".py", ".yaml")]
    assert names == {str(path.relative_to(REPO)) for path in kept}


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


@pytest.mark.full
def test_the_installed_wheel_trains(wheel, tmp_path):
    """In an environment that has the libraries and this wheel: a step with both engines on two
    ranks, from a folder of its own, then the answers of the run; an error is printed once."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (libraries,) = venv.glob("lib/python*/site-packages")
    # The packages alone: what this environment has as links (an editable install) is not followed.
    (libraries / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    python = venv / "bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    write_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl")
    launcher = [str(python), "-m", "megatron_rl.runtime.torchrun", "--standalone"]
    words = overrides(tmp_path, tmp_path / "run", "trainer.num_steps=1", "checkpoint.every_steps=1")
    away = {"env": {"PYTHONPATH": ""}, "cwd": tmp_path}
    train = [*launcher, "--nproc-per-node=2", "-m", "megatron_rl.train", *words]
    assert "step 1/1" in run(train, 280, **away).stdout
    sample = [str(python), "-m", "megatron_rl.sample", str(tmp_path / "run"), "--num-prompts=2"]
    assert "of 2 answers are correct" in run(sample, 120, **away).stdout
    wrong = run([*train, "trainer.num_stepz=1"], 60, check=False, **away)
    assert wrong.returncode == 1
    assert wrong.stdout.count("num_stepz") == 1 and "Traceback" not in wrong.stdout


@pytest.mark.full
def test_a_rank_that_cannot_report_is_shown_by_torchrun(tmp_path):
    (tmp_path / "dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    command = [sys.executable, "-m", "megatron_rl.runtime.torchrun", "--nproc-per-node=1"]
    done = run([*command, str(tmp_path / "dies.py")], 60, check=False)
    assert done.returncode == 1 and "Signal 9 (SIGKILL) received" in done.stdout


def test_the_version_is_that_of_the_newest_tag(tmp_path):
    """Or of the source archive, or the one in setup.py, which is that of the citation."""

    def version() -> str:
        command = [sys.executable, "setup.py", "--version"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("setup.py", "README.md"):
        (tmp_path / name).write_bytes((REPO / name).read_bytes())
    for name in ("conf", "megatron_rl"):
        (tmp_path / name).mkdir()
    citation = (REPO / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version()}\n" in citation
    (tmp_path / "PKG-INFO").write_text("Name: megatron_rl\nVersion: 0.3.0\n")
    assert version() == "0.3.0"
    git("init")
    assert version() == "0.3.0", "no tag yet"
    git("commit", "--allow-empty", "-m", "a")
    git("tag", "v0.4.1")
    assert version() == "0.4.1"
    git("commit", "--allow-empty", "-m", "b")
    assert version() == "0.4.1.post1"
