"""Quantized layers of a tensor-parallel engine are processed in one order, whatever order shards
arrive in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.engine.weights.worker import processing_is_collective
from tests.launch import launch

WORKER = Path(__file__).with_name("processing_worker.py")


@pytest.mark.full
def test_shards_agree_on_the_scale_of_each_layer():
    """Processed on arrival, layer one of rank 0 would meet layer three of rank 1, or wait for
    ever."""
    output = launch(WORKER, 2, timeout=280).stdout
    for case in ("opposite orders", "a message between layers"):
        for rank in range(2):
            assert f"{case} passed on {rank}" in output, output


@pytest.mark.parametrize(
    ("quant_config", "workers", "expected"),
    [(None, 4, False), (object(), 1, False), (object(), 2, True)],
)
def test_layers_wait_only_where_they_must(quant_config, workers, expected):
    """Waiting holds all layers before they are quantized: one worker, or plain weights, do
    without."""
    parallel = SimpleNamespace(world_size_across_dp=workers)
    config = SimpleNamespace(quant_config=quant_config, parallel_config=parallel)
    assert processing_is_collective(config) is expected
