"""What leaves the device between two steps comes back bit for bit, under real megatron."""

from pathlib import Path

import pytest

from tests import zoo
from tests.launch import launch


@pytest.mark.parametrize(
    "cases",
    [("tp2", "dp2_overlap"), pytest.param(("tp2_bf16", "dp2", "ep2"), marks=pytest.mark.full)],
)
def test_training_with_everything_offloaded_at_every_step_is_training_without(tmp_path, cases):
    """TP, the distributed optimizer (overlapped too), experts; float32 and bfloat16."""
    for name in ("llama", "qwen3_moe"):
        zoo.save_tiny_model(name, tmp_path / name)
    worker = Path(__file__).with_name("offload_worker.py")
    result = launch(worker, 2, ["offload", tmp_path, *cases], timeout=300)
    for name in cases:
        assert f"OK {name}\n" in result.stdout, result.stdout
