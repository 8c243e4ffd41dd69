"""The engine on one GPU: it sleeps and wakes in parts. It has not run on a GPU yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", [2, 1])
@pytest.mark.parametrize("quantization", ["null", "fp8"])
def test_hand_overs_with_a_sleeping_engine(tmp_path, quantization, level):
    done = launch(
        Path(__file__).with_name("engine_worker.py"),
        1,
        [tmp_path, quantization, level],
        timeout=280,
        env={"TORCHDYNAMO_DISABLE": "0"},  # conftest sets 1, with which vLLM refuses to compile
        is_warm=False,  # forked from a process that has asked for devices, CUDA cannot start
    )
    assert f"OK level {level}" in done.stdout, done.stdout
