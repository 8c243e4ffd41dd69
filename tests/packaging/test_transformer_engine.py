"""What the policy relies on in Transformer Engine, checked with the real one, on a machine without a GPU or a driver.

It needs an environment of its own, Python 3.12 with the CUDA build of torch 2.11.0, transformer-engine 2.11.0 with its torch part,
megatron-core 0.16.1 and this package's requirements: ``pytest tests/packaging/test_transformer_engine.py --te-python PYTHON``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run

WORKER = Path(__file__).with_name("transformer_engine_worker.py")
CHECKS = (
    "names", "adam", "bf16", "bf16_moments", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8", "fp8_tensorwise_moments", "moe",
    "moe_recomputed", "ends_in_bf16", "param_gather",
)  # fmt: skip


def test_the_policy_and_transformer_engine_understand_each_other(tmp_path, request):
    python = request.config.getoption("--te-python")
    if python is None:
        pytest.skip("needs an environment with Transformer Engine: --te-python PYTHON")
    done = run([python, str(WORKER), str(tmp_path)], timeout=240)
    missing = [check for check in CHECKS if f"OK {check}\n" not in done.stdout]
    assert not missing, f"{missing}: {done.stdout}"
