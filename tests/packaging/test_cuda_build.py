"""The GPU stack on a machine without GPU and driver: what this project takes from vLLM can be
imported from its CUDA build, and the policy runs at the sizes of a 7B model on tensors of device
"cuda" without data, forward and backward.

It needs an environment with the GPU stack of setup.py::

    bash tools/setup_cuda_no_driver.sh DIR
    pytest -m full tests/packaging/test_cuda_build.py --cuda-python DIR/bin/python
"""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
from pathlib import Path

import pytest

from tests.launch import REPO, run

WORKER = Path(__file__).with_name("cuda_build_worker.py")
ANSWERS = Path(__file__).with_name("cuda_answers.c")
MARK = re.compile(r"(OK|DRIVER) \S+:\S+$")


def taken_from_vllm() -> list[str]:
    """``module:name`` for everything that the package imports from vLLM."""
    found = set()
    for path in (REPO / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(found)


def test_what_is_taken_from_vllm_is_known():
    assert "vllm:LLM" in taken_from_vllm()
    assert "vllm.distributed.weight_transfer.base:WeightTransferEngine" in taken_from_vllm()


def test_what_the_worker_replaces_exists():
    """Names of ours and of others that it puts something else in: looked up where it is not run,
    with the arguments of functions that are written out there."""
    worker = importlib.import_module("tests.packaging.cuda_build_worker")
    replaced = set()
    for node in ast.walk(ast.parse(WORKER.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]
        replaced |= {name for name in names if hasattr(worker, name.partition(".")[0])}
        for name in names if names and isinstance(node.value, ast.Lambda) else []:
            arguments = node.value.args
            if arguments.vararg is None:
                theirs = inspect.signature(operator.attrgetter(name)(worker))
                theirs.bind(*arguments.args)  # or it raises
    assert "dist.all_gather_object" in replaced
    for name in sorted(replaced):
        operator.attrgetter(name)(worker)


@pytest.fixture
def python(request) -> str:
    given = request.config.getoption("--cuda-python")
    if given is None:
        pytest.skip("needs an environment with the CUDA build of torch: --cuda-python PYTHON")
    return given


@pytest.mark.full
@pytest.mark.timeout(650)
def test_what_is_taken_from_vllm_is_imported(python):
    names = [*taken_from_vllm(), "megatron_rl.vllm_plugin:register"]
    done = run([python, str(WORKER), "imports", *names], timeout=600)
    said = dict(reversed(line.split()) for line in done.stdout.splitlines() if MARK.match(line))
    # Its library of its own allocations calls the driver; nothing else does when it is imported.
    driver = {"vllm.device_allocator.cumem:CuMemAllocator"}
    assert said == {name: "DRIVER" if name in driver else "OK" for name in names}


@pytest.mark.full
@pytest.mark.timeout(650)
def test_the_policy_runs_on_cuda_tensors_without_data(tmp_path, python):
    where = "import nvidia; print(next(iter(nvidia.__path__)))"
    headers = Path(run([python, "-c", where], timeout=60).stdout.strip()) / "cu13" / "include"
    library = tmp_path / "libcuda.so.1"
    build = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-I{headers}"]
    run([*build, str(ANSWERS), "-o", str(library)], timeout=60)
    environment = {"LD_PRELOAD": str(library)}
    done = run([python, str(WORKER), "tensors", str(tmp_path)], timeout=600, env=environment)
    assert "OK tensors 1\n" in done.stdout
    assert "OK tensors 4\n" in done.stdout
