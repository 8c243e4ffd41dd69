"""Dockerfile.ngc: hadolint is content, its versions are those of setup.py, and each RUN is run or
has a reason.

The image is built only where it is asked for: some GB of wheels are downloaded, and 40 GB of disk
are needed for a while (the layer of 10 GB is written three times). buildah does it as root and
without a daemon, on a stand-in for the base::

    pytest -m full tests/packaging/test_dockerfile.py --build-image
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.launch import REPO, run
from tests.packaging.test_setup import dependencies

DOCKERFILE = REPO / "Dockerfile.ngc"
# What a RUN contains that works on a base of NVIDIA's alone, and what it needs from that.
NEEDS_NVIDIA_BASE = {"transformer-engine[pytorch]": "headers of CUDA 13, cuDNN and NCCL"}
# Versions of tools that the image names and setup.py does not.
TOOLS = {"WHEEL_VERSION"}
PROGRAMS = ("buildah", "debootstrap")
# How this machine reaches the package index; both are files of the distribution where it is
# default.
SETTINGS = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
STAND_IN = f"localhost/megatron_rl_base_{os.getpid()}"
IMAGE = f"localhost/megatron_rl_image_{os.getpid()}"


def text() -> str:
    return DOCKERFILE.read_text(encoding="utf-8")


def instructions(dockerfile: str) -> list[str]:
    """The instructions with their continuation lines; comments and empty lines are left out."""
    found = []
    inside = False
    for line in dockerfile.splitlines():
        if not inside and (not line or line.startswith("#")):
            continue
        if inside:
            found[-1] += "\n" + line
        else:
            found.append(line)
        inside = line.endswith("\\")
    return found


def on_any_base(dockerfile: str) -> str:
    """Without the RUNs that need a base of NVIDIA's."""
    kept = []
    for instruction in instructions(dockerfile):
        needs = any(mark in instruction for mark in NEEDS_NVIDIA_BASE)
        if not (needs and instruction.startswith("RUN ")):
            kept.append(instruction)
    return "\n".join(kept) + "\n"


def version_problems(dockerfile: str) -> list[str]:
    """Differences between the versions of the image and the extra `gpu` of setup.py."""
    versions = dict(re.findall(r"^ARG (\w+_VERSION)=(\S+)$", dockerfile, re.MULTILINE))
    runs = [line for line in instructions(dockerfile) if line.startswith("RUN ")]
    installed = re.findall(r'"([^"=\s]+)==\$\{(\w+)\}"', "\n".join(runs))
    names = {Requirement(package).name: name for package, name in installed}
    problems = []
    for wanted in dependencies()["gpu"]:
        requirement = Requirement(wanted)
        name = names.pop(requirement.name, "no ARG")
        found = versions.pop(name, "no version")
        if str(requirement.specifier) != f"=={found}":
            problems.append(f"setup.py: {wanted}, the image: {name} {found}")
    problems += [f"not in setup.py: {name}" for name in sorted(set(versions) - TOOLS)]
    literal = re.findall(r"\S+==\d\S*", "\n".join(runs))
    return problems + [f"a version outside of ARG: {pin}" for pin in literal]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_hadolint_is_content():
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_hadolint_can_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN cd /x && apt-get install curl\n")
    assert hadolint(tmp_path / "Dockerfile").returncode == 1


def copied(dockerfile: str) -> list[str]:
    """What the COPY instructions take from the build context."""
    copies = re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
    return [name for line in copies for name in line.split()]


def context_problems(dockerfile: str, ignore: str) -> list[str]:
    """Differences between what is copied and what .dockerignore lets into the build context."""
    lines = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    allowed = [line[1:] for line in lines if line.startswith("!")]
    problems = [] if lines[:1] == ["*"] else ["does not begin with *: everything is let in"]
    problems += [
        f"copied, and left out: {name}" for name in sorted({*copied(dockerfile)} - {*allowed})
    ]
    problems += [
        f"let in, not copied: {name}" for name in sorted({*allowed} - {*copied(dockerfile)})
    ]
    return problems


def test_copied_files_exist():
    assert "megatron_rl" in copied(text())
    assert [name for name in copied(text()) if not (REPO / name).exists()] == []


def test_the_build_context_is_what_is_copied():
    ignore = (REPO / ".dockerignore").read_text(encoding="utf-8")
    assert context_problems(text(), ignore) == []
    assert "**/__pycache__" in ignore.splitlines()


@pytest.mark.parametrize(
    ("ignore", "problem"),
    [
        ("*\n!a", "copied, and left out: b"),
        ("*\n!a\n!b\n!c", "let in, not copied: c"),
        ("# *\n!a\n!b", "does not begin with *: everything is let in"),
        ("*\n# !a\n!b", "copied, and left out: a"),
    ],
)
def test_a_wrong_build_context_is_found(ignore, problem):
    assert context_problems("FROM x\nCOPY a b ./\n", ignore) == [problem]


def test_the_versions_are_those_of_setup():
    assert version_problems(text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ARG TORCH_VERSION=2.13.0", "ARG TORCH_VERSION=2.11.0"),
        ("ARG VLLM_VERSION=0.32.0", "ARG VLLM_VERSION=0.14.1"),
        ("ARG MEGATRON_CORE_VERSION=0.19.2", "ARG MEGATRON_CORE_VERSION=0.19.1"),
        ("ARG TRANSFORMER_ENGINE_VERSION=", "ARG TRANSFORMER_ENGINE_VERSION=9."),
        ("ARG VLLM_VERSION=0.32.0\n", ""),
        ("vllm==${VLLM_VERSION}", "vllm==0.32.0"),
        ("vllm==${VLLM_VERSION}", "vllm==${TORCH_VERSION}"),
        ("ARG MAX_JOBS", "ARG APEX_VERSION=1\nARG MAX_JOBS"),
    ],
)
def test_a_difference_is_found(old, new):
    assert old in text()
    assert version_problems(text().replace(old, new)) != []


def test_the_base_image_can_be_chosen():
    """The ARG stands before the first FROM, and every stage starts from it."""
    lines = [line for line in instructions(text()) if re.match(r"(ARG|FROM) ", line)]
    assert lines[0].startswith("ARG BASE_IMAGE=")
    assert all(line.split()[1] == "${BASE_IMAGE}" for line in lines if line.startswith("FROM"))


def test_the_default_base_has_what_the_left_out_runs_need():
    """CUDA of the major and minor number of torch's wheel, the compiler, and the headers of
    cuDNN."""
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", text(), re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"nvcr\.io/nvidia/cuda:13\.0\.\d-cudnn-devel-ubuntu\d\d\.04", base[1])


def test_it_does_not_run_as_root_and_tells_its_health():
    users = [line.split()[1] for line in instructions(text()) if line.startswith("USER ")]
    assert users[-1].isdigit() and users[-1] != "0"
    assert any(line.startswith("HEALTHCHECK ") for line in instructions(text()))


def test_every_run_is_run_or_has_a_reason():
    runs = [line for line in instructions(text()) if line.startswith("RUN ")]
    left = [line for line in instructions(on_any_base(text())) if line.startswith("RUN ")]
    assert len(runs) - len(left) == len(NEEDS_NVIDIA_BASE) < len(left)
    for mark in NEEDS_NVIDIA_BASE:
        assert len([line for line in runs if mark in line]) == 1


@pytest.mark.parametrize(
    ("tag", "installed", "imported"),
    [
        ("", "transformer-engine[pytorch]==2.20.2", "import transformer_engine.pytorch"),
        ("25.09", "/NVIDIA/apex/archive/refs/tags/25.09.tar.gz", "fused_weight_gradient_mlp_cuda"),
    ],
)
def test_apex_is_built_in_place_of_transformer_engine(tag, installed, imported, tmp_path):
    """The RUN itself, with programs that print their arguments."""
    (build,) = (line for line in instructions(text()) if "APEX_CUDA_EXT" in line)
    for name in ("pip", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$APEX_CUDA_EXT" "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = {"TRANSFORMER_ENGINE_VERSION": "2.20.2", "APEX_TAG": tag, "MAX_JOBS": "8", "PATH": path}
    said = run(["bash", "-c", build.removeprefix("RUN ")], 10, env=given).stdout.splitlines()
    assert [line.split()[0] for line in said] == ["pip", "python"]
    assert said[0].endswith(installed) and said[1].endswith(imported)
    assert said[0].startswith("pip 1 ") == bool(tag)  # its kernels are asked for


@pytest.fixture(scope="module")
def stand_in(request, tmp_path_factory) -> Iterator[str]:
    """An image with the smallest system of this machine's distribution."""
    if not request.config.getoption("--build-image"):
        pytest.skip("downloads some GB: --build-image")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}; missing: {missing}")
    folder = tmp_path_factory.mktemp("stand_in")
    root = folder / "root"
    system = platform.freedesktop_os_release()["VERSION_CODENAME"]
    try:
        packages = "--include=ca-certificates"
        run(["debootstrap", "--variant=minbase", packages, system, str(root)], 900)
        for path in filter(os.path.exists, SETTINGS):
            shutil.copy(path, f"{root}{path}")
        shutil.rmtree(root / "dev")
        (folder / "Containerfile").write_text("FROM scratch\nCOPY root /\n")
        run(["buildah", "build", "--isolation=chroot", f"--tag={STAND_IN}", str(folder)], 300)
        yield STAND_IN
    finally:
        shutil.rmtree(root, ignore_errors=True)
        run(["buildah", "rmi", STAND_IN], 120, check=False)


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_every_run_that_needs_no_gpu_base_works(stand_in, tmp_path):
    """The pinned packages are installed, and the image does without a GPU what it says it does."""
    path = tmp_path / "Dockerfile"
    path.write_text(on_any_base(text()))
    options = ["--isolation=chroot", "--format=docker", "--layers=false", f"--file={path}"]
    base = f"--build-arg=BASE_IMAGE={stand_in}"
    container = ""
    try:
        run(["buildah", "build", *options, base, f"--tag={IMAGE}", str(REPO)], 4800)
        made = subprocess.run(
            ["buildah", "from", IMAGE], capture_output=True, text=True, check=True
        )
        container = made.stdout.strip()
        config = json.loads(run(["buildah", "inspect", container], 60).stdout)["Docker"]["config"]
        assert config["Healthcheck"]["Test"] == ["CMD", "nvidia-smi", "--list-gpus"]
        # torchrun looks up the container's own name. Docker makes it known, buildah does not.
        inside = ["buildah", "run", "--isolation=chroot", "--hostname=localhost", container, "--"]
        assert run([*inside, "id", "--user"], 60).stdout.strip() == config["User"] != "0"
        shown = run([*inside, *config["Entrypoint"], *config["Cmd"]], 300).stdout
        assert re.search(r"^weight_sync:", shown, re.MULTILINE), shown
    finally:
        run(["buildah", "rm", container or "none"], 300, check=False)
        run(["buildah", "rmi", IMAGE], 300, check=False)
