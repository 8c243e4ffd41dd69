"""Passes with the starting weights, under real megatron."""

from pathlib import Path

from tests import zoo
from tests.launch import launch


def test_reference_passes_move_the_fewest_bytes_and_change_no_bit_of_the_training(tmp_path):
    """TP, the distributed optimizer (overlapped too), a tied interleaved pipeline, experts; float32
    and bfloat16; one copy of the weights a pass at most, and no gathering of what was gathered."""
    for name in ("llama", "qwen2_tied", "qwen3_moe"):
        zoo.save_tiny_model(name, tmp_path / name)
    result = launch(
        Path(__file__).with_name("reference_worker.py"), 2, ["reference", tmp_path], timeout=300
    )
    assert result.stdout.count("OK ") == 6, result.stdout
