"""The positions of multimodal rope after a sleep that dropped memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu.mm.rope import RopeState

from megatron_rl.engine.weights.worker import WeightReceiver


def receiver(runner: object) -> WeightReceiver:
    made = WeightReceiver()
    made.model_runner = runner
    return made


def test_positions_are_zero_again() -> None:
    rope = RopeState.__new__(RopeState)  # its constructor wants memory that a GPU reads
    rope.positions = torch.full((3, 5), 2**40)
    receiver(SimpleNamespace(model_state=SimpleNamespace(rope_state=rope))).zero_positions()
    assert not rope.positions.any()


def test_a_model_or_a_runner_without_them_is_left_alone() -> None:
    receiver(SimpleNamespace(model_state=SimpleNamespace(rope_state=None))).zero_positions()
    receiver(SimpleNamespace()).zero_positions()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("model_runner", "self.model_state = init_model_state("),
        ("model_states.default", "self.rope_state = get_rope_state("),
        ("mm.rope", "self.positions = torch.zeros("),
    ],
)
def test_vllm_calls_them_so(module: str, line: str) -> None:
    """By its source: these modules need the kernels of GPUs."""
    found = find_spec(f"vllm.v1.worker.gpu.{module}")
    assert found is not None and found.origin is not None
    assert line in Path(found.origin).read_text("utf-8")
