"""The policy on one GPU: every FP8 recipe that the machine has, and offloading. Written without a
GPU at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

pytestmark = pytest.mark.gpu


def test_number_formats_and_memory(tmp_path):
    worker = Path(__file__).with_name("policy_worker.py")
    # Forked from a process that has asked for devices, CUDA cannot start.
    done = launch(worker, 1, [tmp_path], timeout=280, is_warm=False)
    assert "OK bf16" in done.stdout and "OK adam" in done.stdout and "OK memory" in done.stdout, (
        done.stdout
    )
    assert "OK reference" in done.stdout, done.stdout
    for name in ("fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"):
        assert f"OK {name} bfloat16" in done.stdout or f"REFUSED {name}" in done.stdout, done.stdout
