"""Ranks wait for others as long as those work; what hangs, stops or is lost ends the launch, on all
machines and with its cause. A machine is a torchrun of its own here."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.runtime.guard.first_failure import FAILED_HOST
from tests import warm
from tests.distributed.test_errors import running
from tests.distributed.waiting_worker import STALL_S
from tests.launch import REPO, end

WORKER = Path(__file__).with_name("waiting_worker.py")
ENDS_WITHIN_S = 30.0
UNSAVED = "; nothing was saved since step 3"


@contextmanager
def machines(count: int, nproc: int, case: str, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """``count`` torchruns of one launch, ``nproc`` ranks each; output in ``folder/N.txt``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = str(warm.python())
    launcher = [python, "-m", "torch.distributed.run", f"--nnodes={count}"]
    launcher += [f"--nproc-per-node={nproc}", "--rdzv-backend=c10d", "--rdzv-id=waiting"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{port}", str(WORKER), case, str(folder)]
    own = {"PYTHON_EXEC": python, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    started = []
    try:
        for number in range(count):
            with (folder / f"{number}.txt").open("w") as output:
                process = subprocess.Popen(
                    launcher,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=REPO,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            started.append(process)
        yield started
    finally:
        for torchrun in started:
            end(torchrun)


def outputs_of(count: int, nproc: int, case: str, folder: Path) -> list[str]:
    """The output of each machine, in the order of their ranks. No rank may live for
    ``ENDS_WITHIN_S`` after all have met; but for one that is stopped and has no other on its
    machine: its torchrun takes longer."""
    files = [folder / f"{number}.txt" for number in range(count)]
    with machines(count, nproc, case, folder) as started:
        deadline = time.monotonic() + 100
        ranks: dict[int, int] = {}
        while len(ranks) < count * nproc:
            texts = [file.read_text() for file in files]
            assert time.monotonic() < deadline, texts
            time.sleep(0.1)
            for pid, rank in re.findall(r"pid (\d+) rank (\d+)", "".join(texts)):
                ranks[int(rank)] = int(pid)
        if nproc == 1 and case.startswith("stop"):
            del ranks[count - 1]
        since = time.monotonic()
        while any(map(running, ranks.values())) and time.monotonic() < since + 2 * ENDS_WITHIN_S:
            time.sleep(0.1)
        took_s = time.monotonic() - since
        if len(ranks) == count * nproc:
            for torchrun in started:
                torchrun.wait(60)
        outputs = [file.read_text() for file in files]
    assert took_s < ENDS_WITHIN_S, (took_s, outputs)
    return sorted(outputs, key=lambda text: re.findall(r"pid \d+ rank (\d+)", text))


def errors(output: str) -> list[str]:
    """What the ranks themselves say of the end: torchrun repeats it."""
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.full
def test_a_tail_of_five_times_the_old_limit_lives(tmp_path):
    (output,) = outputs_of(1, 3, "tail", tmp_path)
    assert sorted(re.findall(r"rank \d lives", output)) == [f"rank {n} lives" for n in range(3)]


@pytest.mark.full
def test_a_hanging_rank_is_named_and_all_stacks_are_written(tmp_path):
    (output,) = outputs_of(1, 3, "hang", tmp_path)
    (error,) = errors(output)
    assert error.startswith(f"error: no rank has got anything done for {STALL_S:.0f} s")
    assert error.endswith(UNSAVED)
    lines = output[output.index(error) :].splitlines()[1:3]
    assert re.match(r"  rank 2: waiting_worker\.py:\d+ \(sleep\); last: ", lines[0])
    assert re.match(r"  ranks 0, 1: waits in launch\.py:\d+ \(.+\); last: ", lines[1])
    # No machine is to blame for work that hangs.
    assert (tmp_path / FAILED_HOST).read_text() == "\n"
    for rank, function in enumerate(["barrier", "barrier", "sleep"]):
        assert f"in {function}\n" in (tmp_path / f"stacks/rank_{rank}.txt").read_text()


@pytest.mark.full
def test_a_rank_that_holds_the_interpreter_writes_its_stack_too(tmp_path):
    """None of its own threads can run."""
    (output,) = outputs_of(1, 2, "hold", tmp_path)
    assert re.search(r"^  rank 1: does not answer$", output, re.MULTILINE), output
    assert "in hold_the_interpreter\n" in output


@pytest.mark.full
@pytest.mark.parametrize("case", ["stop", "stop busy"])
def test_a_stopped_rank_ends_the_launch(tmp_path, case):
    """``busy``: the others do not even wait for it."""
    (output,) = outputs_of(1, 2, case, tmp_path)
    (error,) = errors(output)
    assert re.match(r"error: rank 1 \(process \d+\) is stopped \(SIGSTOP, state T\)", error)
    assert error.endswith(UNSAVED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("nproc", "case", "cause"),
    [
        (1, "stop busy", r"machine machine1 with rank 1 \(process \d+\) gives no sign for \d+ s"),
        (2, "stop", r"rank 3 \(process \d+\) is stopped \(SIGSTOP"),
        (2, "kill busy", r"rank 3 \(process \d+\) ended without a message"),
        (2, "raise busy", "a fault of rank 3"),
    ],
)
def test_a_rank_that_is_lost_ends_the_other_machine_too(tmp_path, nproc, case, cause):
    outputs = outputs_of(2, nproc, case, tmp_path)
    assert re.search(f"error: .*{cause}", outputs[0]), outputs
    if nproc > 1:  # else no process of that machine is left to say it
        assert re.search(f"error: .*{cause}", outputs[1]), outputs
    # Also where it is another machine that says so.
    assert (tmp_path / FAILED_HOST).read_text() == "machine1\n"


@pytest.mark.full
def test_a_machine_whose_ranks_have_finished_is_not_missed(tmp_path):
    outputs = outputs_of(2, 1, "late end", tmp_path)
    assert "rank 0 lives" in outputs[0]
    assert not errors("\n".join(outputs)), outputs
