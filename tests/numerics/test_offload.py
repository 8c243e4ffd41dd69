"""What leaves the device between two steps comes back bit for bit, under real megatron."""

from pathlib import Path

from tests import zoo
from tests.launch import launch


def test_training_with_everything_offloaded_at_every_step_is_training_without(tmp_path):
    """TP, the distributed optimizer (overlapped too), experts; float32 and bfloat16."""
    for name in ("llama", "qwen3_moe"):
        zoo.save_tiny_model(name, tmp_path / name)
    result = launch(
        Path(__file__).with_name("offload_worker.py"), 2, ["offload", tmp_path], timeout=300
    )
    assert result.stdout.count("OK ") == 5, result.stdout
