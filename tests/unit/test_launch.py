"""The launcher of the tests: output and exit code come back, and nothing survives a time-out."""

import sys

import psutil
import pytest

from tests.launch import launch, run

# A child in a session of its own, as torchrun starts its ranks: killing the process group would
# miss it.
PARENT = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleeper, start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(60)
"""


def test_a_time_out_ends_the_grandchildren_too():
    with pytest.raises(AssertionError, match=r"no end within 2 s") as raised:
        run([sys.executable, "-c", PARENT], 2)
    pid = int(str(raised.value).rsplit("child ", 1)[1].split()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_output_of_both_streams_and_the_exit_code():
    script = "import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(5)"
    done = run([sys.executable, "-c", script], 20, check=False)
    assert done.returncode == 5
    assert {"to out", "to err"} <= set(done.stdout.splitlines())
    with pytest.raises(AssertionError, match=r"(?s)exit code 5: .*to err"):
        run([sys.executable, "-c", script], 20)


def test_launch_starts_every_rank_with_arguments_and_environment(tmp_path):
    script = tmp_path / "worker.py"
    # one write per line: the two ranks share a pipe without buffers
    line = "f\"{e['RANK']} {e['WORLD_SIZE']} {sys.argv[1:]} {e['EXTRA']}\\n\".encode()"
    script.write_text(f"import os, sys\ne = os.environ\nos.write(1, {line})\n")
    lines = launch(script, 2, ["a", 1], env={"EXTRA": "x"}).stdout.splitlines()
    assert [f"{rank} 2 ['a', '1'] x" in lines for rank in (0, 1)] == [True, True]
