"""Planned weights, gradients, optimizer and activations are within a tenth of what a tiny model
really allocates."""

from pathlib import Path

from tests import zoo
from tests.launch import launch


def test_planned_is_allocated(tmp_path):
    for name in ("llama", "qwen2_tied"):
        zoo.save_tiny_model(name, tmp_path / name)
    result = launch(
        Path(__file__).with_name("checkpoint_worker.py"), 2, ["measured", tmp_path], timeout=300
    )
    assert result.stdout.count("OK measured ") == 6, result.stdout
