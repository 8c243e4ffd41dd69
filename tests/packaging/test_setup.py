"""The set-up: dependency lists agree, stand-in wheels are empty, .ci/run really runs README's
command and keeps its exit code."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.launch import REPO
from tools.repack_wheel import LABEL, repack
from tools.write_stub_wheels import VERSION, main, write_stub_wheel


def dependencies() -> dict[str, list[str]]:
    """``REQUIRED`` (under "") and the extras, read from setup.py without running it."""
    tree = ast.parse((REPO / "setup.py").read_text(encoding="utf-8"))
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    return {"": ast.literal_eval(values["REQUIRED"]), **ast.literal_eval(values["EXTRAS"])}


def constraints() -> dict[str, str]:
    lines = (REPO / "tools/constraints_cpu.txt").read_text(encoding="utf-8").splitlines()
    return {
        line.split("==")[0].lower().replace("_", "-"): line.split("==")[1]
        for line in lines
        if line and not line.startswith("#")
    }


@pytest.mark.parametrize("extra", ["", "cpu", "test", "vision"])
def test_the_tested_versions_satisfy_what_is_asked_for(extra):
    pinned = constraints()
    for text in dependencies()[extra]:
        requirement = Requirement(text)
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{text}: constraints_cpu.txt has {version}"
        )


def test_the_stand_ins_are_not_constrained():
    """A version of the index in the constraints would win over the empty wheel."""
    assert not {"torchaudio", "torchcodec", "triton"} & set(constraints())


def repacked(folder: Path, name: str, released: str, files: dict[str, str]) -> Path:
    """Where pip has installed what ``repack`` makes of a wheel for a Python that is still to
    come."""
    info = f"{name}-{released}.dist-info"
    wheel = folder / f"{name}-{released}-cp399-cp399-linux_x86_64.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {released}\n"
    described = {
        f"{info}/METADATA": f"{metadata}Requires-Python: >=3.99\nLicense: kept\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: cp399-cp399-linux_x86_64\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**described, **files}.items():
            archive.writestr(path, text)
    made = repack(wheel, folder / "wheels")
    assert made.name == f"{name}-{released}{LABEL}-py3-none-any.whl"
    target = folder / "site"
    words = ["install", "--no-deps", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", *words, "--no-index"]
    assert subprocess.run([*pip, str(wheel)], capture_output=True).returncode
    # As the set-up asks: by name, with the version of the constraints.
    asked = f"{name}=={constraints()[name.replace('_', '-')]}"
    found = [*pip, "--find-links", str(made.parent), asked]
    subprocess.run(found, check=True, capture_output=True)
    assert "License: kept" in (target / f"{made.name[:-17]}.dist-info/METADATA").read_text()
    return target


def test_megatron_core_is_repacked_for_any_python(tmp_path):
    files = {
        "megatron/core/__init__.py": "there = True\n",
        "megatron/core/datasets/helpers_cpp.cpython-399-x86_64-linux-gnu.so": "compiled",
    }
    target = repacked(tmp_path, "megatron_core", constraints()["megatron-core"], files)
    assert [path.name for path in (target / "megatron/core").glob("[!_]*")] == []
    assert (target / "megatron/core/__init__.py").read_text() == "there = True\n"


def test_torchvision_is_repacked_without_its_compiled_parts(tmp_path):
    """The version of the constraints is that of the new wheel, which no index has; pip finds its
    record whole."""
    version = constraints()["torchvision"]
    released = version.removesuffix(LABEL)
    files = {
        "torchvision/__init__.py": "there = True\n",
        "torchvision/_meta_registrations.py": "raise RuntimeError('no such operator')\n",
        "torchvision/_C.so": "compiled",
        "torchvision/image.so": "compiled",
        "torchvision.libs/libjpeg.so.62": "compiled",
    }
    assert version != released
    target = repacked(tmp_path, "torchvision", released, files)
    installed = {str(path.relative_to(target)) for path in (target / "torchvision").iterdir()}
    assert installed - {"torchvision/__pycache__"} == {
        "torchvision/__init__.py",
        "torchvision/_meta_registrations.py",
    }
    assert (target / "torchvision/_meta_registrations.py").read_text() == ""
    assert not (target / "torchvision.libs").exists()


def test_the_installed_torchvision_has_transforms_and_nothing_compiled():
    """What vLLM and transformers use of it; the one of an index cannot be imported beside a CPU
    build of torch."""
    import torchvision
    from torchvision.transforms.v2 import functional

    folder = Path(torchvision.__file__).parent
    assert not list(folder.rglob("*.so"))
    made = functional.resize(torch.zeros(3, 8, 8, dtype=torch.uint8), [4, 4])
    assert made.shape == (3, 4, 4)


def test_stub_wheel_has_metadata_and_nothing_to_import(tmp_path):
    archive = zipfile.ZipFile(write_stub_wheel(tmp_path, "torchaudio"))
    assert {name.split("/")[0] for name in archive.namelist()} == {
        f"torchaudio-{VERSION}.dist-info"
    }
    metadata = archive.read(f"torchaudio-{VERSION}.dist-info/METADATA").decode()
    assert f"Version: {VERSION}\n" in metadata


@pytest.mark.full
def test_pip_takes_the_stub_where_it_is_told_to_stay_below_a_release(tmp_path):
    """A company's constraint, and a higher version beside the stub: the stub is installed all the
    same."""
    stubs, others = tmp_path / "stubs", tmp_path / "others"
    main(str(stubs), "torchaudio")
    others.mkdir()
    stub = next(stubs.glob("*.whl"))
    content = {}
    with zipfile.ZipFile(stub) as archive:
        for name in archive.namelist():
            content[name.replace(VERSION, "0.29.0")] = (
                archive.read(name).decode().replace(VERSION, "0.29.0")
            )
    with zipfile.ZipFile(others / "torchaudio-0.29.0-py3-none-any.whl", "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    (tmp_path / "cap.txt").write_text("torchaudio<=0.29.1\n")
    places = ["--no-index", "--find-links", str(stubs), "--find-links", str(others)]
    limits = [
        "--constraint",
        str(tmp_path / "cap.txt"),
        "--constraint",
        str(stubs / "constraints.txt"),
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *places,
        *limits,
        "--target",
        str(tmp_path / "site"),
        "torchaudio",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "site").glob("*.dist-info")] == [
        f"torchaudio-{VERSION}.dist-info"
    ]


def set_up(*args: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(REPO / "tools/setup_cpu.sh"), *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_set_up_names_an_unusable_python(tmp_path):
    """One line that says what is wrong and what to do; nothing is created."""
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = set_up("--venv", str(tmp_path / "venv"), "--python", str(old))
    assert done.returncode == 1
    assert re.fullmatch(
        r"setup_cpu: \S+/python3\.8 \(Python 3\.8\.1\) cannot be used: Python 3\.11.*--python"
        r" EXE\.\n",
        done.stderr,
    )
    assert not (tmp_path / "venv").exists()


def test_set_up_takes_the_first_python_that_will_do(tmp_path):
    """Of those on the path; it says which, and then what it misses there."""
    for name, code in (("python3", 1), ("python3.11", 0), ("python3.12", 0)):
        program = f'#!/bin/sh\n[ "$1" = --version ] && echo "{name}" && exit 0\n'
        asks = f'case "$2" in *version_info*) exit {code};; *) exit 1;; esac\n'
        (tmp_path / name).write_text(program + asks)
        (tmp_path / name).chmod(0o755)
    done = set_up("--venv", str(tmp_path / "venv"), PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1
    assert done.stderr.startswith("setup_cpu: python3.11 has no module venv.")
    assert not (tmp_path / "venv").exists()


def test_set_up_refuses_an_unknown_option():
    done = set_up("--frob")
    assert done.returncode == 1
    assert "unknown option --frob" in done.stderr


def ci_run(folder, readme: str, *args: str) -> subprocess.CompletedProcess:
    """.ci/run in a project of its own that consists of ``readme``."""
    (folder / ".ci").mkdir()
    shutil.copy(REPO / ".ci/run", folder / ".ci/run")
    (folder / "README.md").write_text(readme)
    return subprocess.run(
        ["bash", str(folder / ".ci/run"), *args], capture_output=True, text=True, timeout=60
    )


def test_ci_runs_in_a_copy_and_keeps_the_exit_code(tmp_path):
    done = ci_run(
        tmp_path,
        "# x\n```bash\n# train\ntouch first\n\n# test\ntouch second && pwd && ls && exit 3\n```\n",
    )
    assert done.returncode == 3
    assert "+ touch second" in done.stdout
    assert "README.md" in done.stdout.splitlines()
    assert not (tmp_path / "second").exists()
    copy = next(line for line in done.stdout.splitlines() if line.startswith("/"))
    assert not subprocess.run(["ls", copy], capture_output=True).stdout, "the copy is removed"


def test_ci_says_when_readme_has_no_command(tmp_path):
    done = ci_run(tmp_path, "# x\n```bash\ntouch first\n```\n")
    assert done.returncode == 2
    assert "no second command" in done.stderr
