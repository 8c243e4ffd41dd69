"""What of vLLM runs on GPUs alone, run on a CPU by the interpreter of Triton: the sampler's
kernels, and the whole engine.

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

HERE = Path(__file__).parent
INTERPRETER = "tests.numerics.triton_interpreter"
KERNELS, ENGINE = HERE / "sampler_kernels_worker.py", HERE / "gpu_engine_worker.py"

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment(request):
    """The variables under which a child finds Triton and interprets it."""
    folder = request.config.getoption("--triton-path")
    if folder is None and find_spec("triton") is None:
        pytest.skip("needs Triton: --triton-path FOLDER, see this file")
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH"), folder]))
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def kernels(environment):
    # Not warm: there vLLM has been imported without Triton.
    settings = {"timeout": 600, "env": environment, "is_warm": False}
    return launch(INTERPRETER, nproc=1, args=[KERNELS], **settings).stdout


@pytest.fixture(scope="module")
def engine(environment, tmp_path_factory):
    variables = {**environment, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    folder = tmp_path_factory.mktemp("gpu_engine")
    settings = {"timeout": 800, "env": variables, "is_warm": False}
    return launch(INTERPRETER, nproc=1, args=[ENGINE, folder], **settings).stdout


@pytest.mark.parametrize("name", cases_of(KERNELS))
def test_kernels_of_the_sampler(kernels, name):
    assert not verdict(kernels, name), verdict(kernels, name)


@pytest.mark.parametrize("name", cases_of(ENGINE))
def test_engine_with_the_runner_of_gpus(engine, name):
    assert not verdict(engine, name), verdict(engine, name)
