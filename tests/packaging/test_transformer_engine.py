"""What the policy relies on in Transformer Engine, checked with the real one, on a machine without
a GPU or a driver.

It needs an environment with the GPU stack of setup.py, which ``tools/setup_cuda_no_driver.sh``
makes::

    bash tools/setup_cuda_no_driver.sh DIR
    pytest tests/packaging/test_transformer_engine.py --te-python DIR/bin/python
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run

WORKER = Path(__file__).with_name("transformer_engine_worker.py")


@pytest.fixture
def python(request) -> str:
    given = request.config.getoption("--te-python")
    if given is None:
        pytest.skip("needs an environment with Transformer Engine: --te-python PYTHON")
    return given


@pytest.mark.timeout(650)
def test_two_processes_build_sequence_parallel_layers(tmp_path, python):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([python, *launcher, str(WORKER), str(tmp_path), "two"], timeout=600)
    assert done.stdout.count("OK sequence") == 2


@pytest.mark.timeout(650)
def test_the_policy_and_transformer_engine_understand_each_other(tmp_path, python):
    done = run([python, str(WORKER), str(tmp_path)], timeout=600)
    assert "OK everything\n" in done.stdout
