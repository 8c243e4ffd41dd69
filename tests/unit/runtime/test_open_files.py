"""The limit on open files is raised at the start of a process, and that of torchrun with it."""

from __future__ import annotations

import resource
import subprocess
import sys

from megatron_rl.runtime.process import raise_limit
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
