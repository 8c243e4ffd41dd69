"""The limit on open files: raised at the start of a process, enough for the groups of 600 ranks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from megatron_rl.runtime.open_files import raise_limit
from tests.launch import REPO

CHILD = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from megatron_rl.runtime.process import prepare
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
prepare()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_program_of_a_launch_starts_with_the_hard_limit():
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(REPO)], capture_output=True, text=True, timeout=100
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**20 if hard == resource.RLIM_INFINITY else min(hard, 2**20)
    assert done.stdout.strip() == str((wanted, hard)), done.stderr


def test_another_process_is_raised_and_a_high_limit_is_left():
    """torchrun is raised by its ranks."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        _, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (64, hard))
        assert raise_limit(child.pid) > 64
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0] > 64
        before = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        raise_limit(child.pid)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == before
        child.kill()


RANKS = 600
GROUPS = 3  # of the world: torch's, that of control, vLLM's
SIMULATED = REPO / "tests/unit/runtime/many_ranks.py"


def first_of(ranks: int, soft_limit: int, raised: bool) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SIMULATED), "first", str(ranks), str(GROUPS)]
    words += [str(soft_limit), str(int(raised))]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_rank_of_600_holds_its_connections_under_a_soft_limit_of_1024():
    done = first_of(RANKS, 1024, raised=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"connected to {GROUPS * (RANKS - 1)}" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "fits"), [(330, True), (345, False)])
def test_without_that_the_limit_is_met_near_340_ranks(ranks, fits):
    done = first_of(ranks, 1024, raised=False)
    assert (done.returncode == 0) == fits, done.stdout + done.stderr
    assert fits or "Too many open files" in done.stdout + done.stderr
