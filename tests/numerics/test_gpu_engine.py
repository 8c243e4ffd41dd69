"""What of vLLM runs on GPUs alone, run on a CPU by the interpreter of Triton: the whole engine, and
kernels of its sampler that few samples do not show.

On a CPU vLLM has another model runner and another sampler. Triton is no requirement of this package
there; give a folder that has it: ``pip install --no-deps --target FOLDER triton==3.7.1`` (the
version of torch 2.13.0), ``pytest -m full tests/numerics/test_gpu_engine.py --triton-path FOLDER``.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import REPO, launch
from tests.numerics.rollout_models import cases_of, verdict

INTERPRETER = "tests.numerics.triton_interpreter"
ENGINE = Path(__file__).with_name("gpu_engine_worker.py")

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(request, tmp_path_factory):
    """What the program said, which finds Triton and interprets it."""
    folder = request.config.getoption("--triton-path")
    if folder is None and find_spec("triton") is None:
        pytest.skip("needs Triton: --triton-path FOLDER, see this file")
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH"), folder]))
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    args = [ENGINE, tmp_path_factory.mktemp("gpu_engine")]
    # Not warm: there vLLM has been imported without Triton.
    return launch(INTERPRETER, 1, args, timeout=800, env=variables, is_warm=False).stdout


@pytest.mark.parametrize("name", cases_of(ENGINE))
def test_engine_with_the_runner_of_gpus(engine, name):
    assert not verdict(engine, name), verdict(engine, name)
