"""Passes with the starting weights, under real megatron."""

from pathlib import Path

import pytest

from tests import zoo
from tests.launch import launch


@pytest.mark.parametrize(
    "cases",
    [
        ("tp2", "dp2_overlap"),
        pytest.param(("dp2_bf16", "pp2_tied_vpp", "ep2"), marks=pytest.mark.full),
    ],
)
def test_reference_passes_move_the_fewest_bytes_and_change_no_bit_of_the_training(tmp_path, cases):
    """TP, the distributed optimizer (overlapped too), a tied interleaved pipeline, experts; float32
    and bfloat16; one copy of the weights a pass at most, and no gathering of what was gathered."""
    for name in ("llama", "qwen2_tied", "qwen3_moe"):
        zoo.save_tiny_model(name, tmp_path / name)
    worker = Path(__file__).with_name("reference_worker.py")
    result = launch(worker, 2, ["reference", tmp_path, *cases], timeout=300)
    for name in (*cases, "gathered once"):
        assert f"OK {name}\n" in result.stdout, result.stdout
