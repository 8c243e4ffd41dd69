"""Losses, gradients and weights that are not finite, in real megatron optimizers of every kind, on two processes."""

from pathlib import Path

from tests.launch import launch

WORKER = Path(__file__).with_name("nonfinite_worker.py")


def test_steps_are_skipped_on_all_ranks_and_bad_weights_are_named(tmp_path):
    """TP, DP (plain, distributed, bf16, overlapped), PP, EP; clipping on and off; a NaN that one rank alone reads."""
    done = launch(WORKER, 2, [tmp_path, tmp_path], timeout=400)
    assert done.stdout.count("OK ") == 12, done.stdout
