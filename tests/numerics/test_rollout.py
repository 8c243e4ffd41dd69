"""The rollout engine: logprobs and tokens of real vLLM against transformers, across layouts, and
beside other jobs."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_rl.engine import side_effects
from tests.launch import launch
from tests.numerics.rollout_models import cases_of, verdict

HERE = Path(__file__).parent
TIMEOUT_S = 280
ONE_PROCESS, TWO_PROCESSES = HERE / "rollout_worker.py", HERE / "rollout_ranks_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def one_process(folder):
    return launch(ONE_PROCESS, nproc=1, args=[folder], timeout=TIMEOUT_S).stdout


@pytest.fixture(scope="module")
def killed_launch(folder):
    """What a launch left in shared memory that was killed, two hours ago, while its engine
    started."""
    result = launch(TWO_PROCESSES, args=[folder, 2, "die"], timeout=TIMEOUT_S, check=False)
    assert result.returncode != 0
    left = [name for name in result.stdout.split() if name.startswith(side_effects.PREFIX)]
    then = time.time() - 7200.0
    for name in left:
        os.utime(side_effects.DIRECTORY / name, (then, then))
    return left


@pytest.fixture(scope="module")
def tensor_parallel_job(folder, one_process):
    return launch(TWO_PROCESSES, args=[folder, 2, "run"], timeout=TIMEOUT_S).stdout


@pytest.fixture(scope="module")
def two_jobs(folder, one_process, killed_launch):
    """Of two ranks each, at the same time on this host, after one that was killed."""
    script, args = TWO_PROCESSES, [folder, 2, "run"]
    with ThreadPoolExecutor(2) as pool:
        return [
            job.result().stdout
            for job in [pool.submit(launch, script, args=args, timeout=TIMEOUT_S) for _ in range(2)]
        ]


@pytest.fixture(scope="module")
def data_parallel_job(folder, one_process):
    return launch(TWO_PROCESSES, args=[folder, 1, "run"], timeout=TIMEOUT_S).stdout


@pytest.mark.parametrize("name", cases_of(ONE_PROCESS))
def test_one_process(one_process, name):
    assert not verdict(one_process, name), verdict(one_process, name)


@pytest.mark.full
@pytest.mark.parametrize("name", cases_of(TWO_PROCESSES))
def test_tensor_parallel(tensor_parallel_job, name):
    assert not verdict(tensor_parallel_job, name, ranks=2), verdict(
        tensor_parallel_job, name, ranks=2
    )


@pytest.mark.full
def test_a_killed_launch_leaves_names(killed_launch):
    """Else the next test shows nothing. All of them are this project's own."""
    if not torch.cpu._is_avx512_supported():
        assert not killed_launch
        pytest.skip("vLLM's ranks share no memory on a processor without AVX-512")
    assert len(killed_launch) > 1


@pytest.mark.full
@pytest.mark.parametrize("name", cases_of(TWO_PROCESSES))
def test_tensor_parallel_beside_another_job(two_jobs, name):
    for output in two_jobs:
        assert not verdict(output, name, ranks=2), verdict(output, name, ranks=2)


@pytest.mark.full
def test_the_next_launch_removes_them(killed_launch, two_jobs):
    assert not [name for name in killed_launch if (side_effects.DIRECTORY / name).exists()]


@pytest.mark.full
@pytest.mark.parametrize("name", cases_of(TWO_PROCESSES))
def test_data_parallel(data_parallel_job, name):
    assert not verdict(data_parallel_job, name, ranks=2), verdict(data_parallel_job, name, ranks=2)
