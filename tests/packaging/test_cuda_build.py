"""The GPU stack on a machine without GPU and driver: what this project takes from vLLM can be
imported from its CUDA build, and the policy runs at the sizes of a 7B model on tensors of device
"cuda" without data, forward and backward.

It needs an environment with the GPU stack of setup.py::

    bash tools/setup_cuda_no_driver.sh DIR
    pytest -m full tests/packaging/test_cuda_build.py --cuda-python DIR/bin/python
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.launch import REPO, run

WORKER = Path(__file__).with_name("cuda_build_worker.py")


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
    assert "vllm.v1.engine.async_llm:AsyncLLM" in taken_from_vllm()


@pytest.mark.full
def test_the_stack_is_imported_and_the_policy_runs_without_data(tmp_path, request):
    python = request.config.getoption("--cuda-python")
    if python is None:
        pytest.skip("needs an environment with the CUDA build of torch: --cuda-python PYTHON")
    modules = [*taken_from_vllm(), "megatron_rl.trainer.vllm_plugin:register"]
    done = run([python, str(WORKER), str(tmp_path), *modules], timeout=280)
    wanted = [*(f"OK import {name}" for name in modules), "OK tensors 1", "OK tensors 4"]
    missing = [line for line in wanted if f"{line}\n" not in done.stdout]
    assert not missing, f"{missing}: {done.stdout}"
