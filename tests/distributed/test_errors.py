"""Real launches that fail: one message, from the rank that failed first, and nothing left
behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launch import REPO, end, launch

LAYER = "error: model.path: the last layer has another shape; correct it"
FILE = "error: data.train: no such file; correct the path"
UNSAVED = "; nothing was saved since step 3"
WORKER = Path(__file__).with_name("errors_worker.py")


def own_lines(output: str) -> list[str]:
    """Without what torchrun itself says: its warnings, its traceback and its summary."""
    before = output.split('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
    others = re.compile(r"[WE]\d{4} [\d:.]+ \d+ \S*torch/distributed|pid|$")
    return [line for line in before.splitlines() if not others.match(line)]


def fail(case: str, nproc: int, rank: int = 0) -> str:
    done = launch(WORKER, nproc, [case, rank], timeout=100, check=False, is_warm=False)
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("case", "nproc", "rank", "text"),
    [
        pytest.param("user_one", 3, 2, LAYER, marks=pytest.mark.full),
        ("early_all", 4, 0, FILE),
        pytest.param("user_all", 4, 0, LAYER, marks=pytest.mark.full),
        pytest.param("early_one", 2, 1, FILE, marks=pytest.mark.full),
        pytest.param("user_all", 8, 0, LAYER, marks=pytest.mark.full),
    ],
)
def test_a_user_error_is_one_line_wherever_it_arises(case, nproc, rank, text):
    output = fail(case, nproc, rank)
    assert own_lines(output) == [text]
    # In torchrun's summary as well, as the root cause, and without the ranks that only followed.
    assert f"traceback : {text}" in output.rpartition("Root Cause")[2]


@pytest.mark.full
def test_a_long_message_is_cut_and_says_so():
    lines = own_lines(fail("long", 2, 1))
    assert lines[0] == "error: problem 0"
    assert lines[-1] == "  ... and 39 more lines"
    assert len(lines) <= 15


def test_a_fault_shows_its_traceback_once():
    output = fail("fault_all", 2)
    own = "\n".join(own_lines(output))
    assert output.count("KeyError: 'a fault'\n") - output.count("error: KeyError") == 1
    assert own.count("Traceback (most recent call last)") == 1
    assert re.search(r"\[rank \d\] error: KeyError: 'a fault'$", own)


@pytest.mark.full
def test_out_of_memory_is_said_in_words():
    lines = own_lines(fail("memory", 2, 1))
    assert lines[0].startswith("error: rank 1 is out of memory")
    assert "Traceback" not in "\n".join(lines)


@pytest.mark.parametrize("case", ["kill", pytest.param("compute", marks=pytest.mark.full)])
def test_a_killed_rank_is_named_by_those_that_are_left(case):
    """``kill``: the others wait for it in a collective; ``compute``: they are busy."""
    output = fail(case, 3, 1)
    (line,) = own_lines(output)
    assert re.match(r"error: rank 1 \(process \d+\) ended without a message", line)
    assert line.endswith(UNSAVED)
    assert "SIGKILL" in output.rpartition("Root Cause")[2]


@contextmanager
def serving(nproc: int, case: str = "serve") -> Iterator[tuple[subprocess.Popen, list[int], Path]]:
    """A launch whose ranks meet again and again: torchrun, the ranks and the file of the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", str(WORKER), case]
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    output = Path(os.environ["SERVING_OUTPUT"])
    with output.open("w") as file:
        torchrun = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while len(ranks) < nproc:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
            ranks = [int(pid) for pid in re.findall(r"pid (\d+)\s", output.read_text())]
        time.sleep(0.5)
        yield torchrun, ranks, output
    finally:
        end(torchrun)
        for rank in filter(running, ranks):
            os.kill(rank, signal.SIGKILL)


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(autouse=True)
def _output_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVING_OUTPUT", str(tmp_path / "output"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_ranks_end_with_their_torchrun(number):
    with serving(2) as (torchrun, ranks, _):
        torchrun.send_signal(number)
        assert torchrun.wait(10) == -number
        assert wait_until(lambda: not any(map(running, ranks)), 5)


@pytest.mark.parametrize(
    ("case", "number", "text"),
    [
        pytest.param("stop", signal.SIGTERM, f"ended by SIGTERM{UNSAVED}", marks=pytest.mark.full),
        pytest.param("serve", signal.SIGINT, f"interrupted{UNSAVED}", marks=pytest.mark.full),
        ("serve", signal.SIGTERM, f"ended by SIGTERM{UNSAVED}"),
    ],
)
def test_a_signal_to_torchrun_is_one_line(case, number, text):
    """``stop``: rank 0 computes while rank 1 waits for it inside a collective."""
    with serving(2, case) as (torchrun, ranks, output):
        torchrun.send_signal(number)
        assert torchrun.wait(20) == 1
        assert not any(map(running, ranks))
        lines = output.read_text().splitlines()
    own = [line for line in lines if "saved" in line or "rank" in line]
    assert own == [text]
