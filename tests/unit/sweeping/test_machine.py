"""Shares of a machine, by hand. That runs keep to their GPUs has not been seen on a machine with
several: torch reads the variable."""

import pytest

from megatron_rl.sweeping.running import shares


def test_neighboring_gpus_one_a_process():
    assert shares(2, 2, {}, num_gpus=4, num_cores=64) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert shares(2, 3, {}, num_gpus=8, num_cores=64)[1] == {"CUDA_VISIBLE_DEVICES": "3,4,5"}


def test_only_gpus_that_the_sweep_may_use_are_given_away():
    """By the names that they have there; torch leaves out what stands behind a wrong one."""
    visible = {"CUDA_VISIBLE_DEVICES": "6,GPU-8f,1"}
    assert shares(2, 1, visible, num_gpus=3, num_cores=64) == [
        {"CUDA_VISIBLE_DEVICES": "6"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8f"},
    ]
    with pytest.raises(ValueError, match=r"--parallel 3 --nproc 1: .* makes 3, and 2 are visible"):
        shares(3, 1, visible, num_gpus=2, num_cores=64)


def test_without_gpus_cores_matter_to_a_single_process_alone():
    assert shares(3, 1, {}, num_gpus=0, num_cores=8) == 3 * [{"OMP_NUM_THREADS": "2"}]
    assert shares(3, 1, {}, num_gpus=0, num_cores=2) == 3 * [{"OMP_NUM_THREADS": "1"}]
    assert shares(3, 2, {}, num_gpus=0, num_cores=8) == [{}, {}, {}]
    assert shares(2, 1, {"OMP_NUM_THREADS": "4"}, num_gpus=0, num_cores=8) == [{}, {}]


def test_one_run_at_a_time_has_all_there_is():
    assert shares(1, 8, {}, num_gpus=8, num_cores=64) == [{}]
