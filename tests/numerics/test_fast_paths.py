"""What is switched on for a CUDA device, or saves time or memory, computes what the plain way does."""

from pathlib import Path

from tests.launch import launch

CHECKS = ("random_states", "pipeline_lengths", "rotary", "activation", "experts", "recomputed")


def test_fast_paths_compute_what_plain_ones_do(tmp_path):
    done = launch(Path(__file__).with_name("fast_paths_worker.py"), 2, [tmp_path], timeout=300)
    missing = [check for check in CHECKS if f"OK {check}\n" not in done.stdout]
    assert not missing, f"{missing}: {done.stdout}"
