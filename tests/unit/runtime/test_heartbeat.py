"""What the heartbeat counts, and what is said of a launch that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl.runtime.guard import heartbeat
from megatron_rl.runtime.guard.activity import Activity
from megatron_rl.runtime.guard.heartbeat import BEAT_S, Count
from megatron_rl.runtime.launch import NO_LIMIT, from_first_rank
from tests.launch import REPO
from tests.ranks import on_ranks


def test_time_is_counted_in_beats_without_a_change():
    count = Count()
    assert [count.seen(value) for value in (3, 3, 3, 4, 4)] == [0, BEAT_S, 2 * BEAT_S, 0, BEAT_S]


def test_activity_counts_and_keeps_the_last_note():
    activity = Activity()
    activity.note("a")
    activity.note("b")
    assert (activity.count, activity.doing) == (2, "b")


def test_ranks_at_one_place_are_one_line_and_the_fewest_come_first(tmp_path):
    places = dict.fromkeys(range(8), "here; last: a") | {5: "there; last: b"}
    lines = heartbeat.stall_message(60.0, places, tmp_path).splitlines()
    assert lines[0].startswith("no rank has got anything done for 60 s")
    assert f"the stacks of all threads are in {tmp_path}" in lines[0]
    assert lines[1:] == ["  rank 5: there; last: b", "  ranks 0, 1, 2, 3, 4, 6, 7: here; last: a"]


def test_many_places_are_cut(tmp_path):
    lines = heartbeat.stall_message(60.0, {n: f"place {n}" for n in range(20)}, None).splitlines()
    assert len(lines) == 8
    assert lines[-1] == "  and 14 more places"


def test_stacks_go_to_a_file_of_the_rank(tmp_path):
    heartbeat.dump(3, tmp_path / "new")
    text = (tmp_path / "new/rank_3.txt").read_text()
    assert text.startswith(f"rank 3, process {os.getpid()}: ")
    assert "in test_stacks_go_to_a_file_of_the_rank\n" in text


def test_a_process_that_has_ended_is_not_asked():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    heartbeat.ask(process.pid)


PROGRAM = """
import re
from megatron_rl.runtime.guard import heartbeat
heartbeat.answer_signal()
print("ready", flush=True)
def never_ends():
    re.fullmatch("(a|a)*b", "a" * 60)
never_ends()
"""


def test_a_signal_shows_the_stack_of_a_process_whose_threads_cannot_run():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGUSR2)
        lines = [process.stderr.readline() for _ in range(4)]
        assert process.poll() is None, "it goes on"
        process.kill()
    assert any("in never_ends" in line for line in lines), lines


@on_ranks(3)
def test_what_the_first_rank_finds_reaches_all():
    calls = []
    assert from_first_rank(lambda: calls.append(1) or dist.get_rank()) == 0
    assert len(calls) == (dist.get_rank() == 0)


@on_ranks(2)
def test_what_the_first_rank_raises_all_raise():
    def refuse() -> None:
        raise ValueError("data.train: no such file")

    try:
        from_first_rank(refuse)
    except ValueError as error:
        assert str(error) == "data.train: no such file"
    else:
        raise AssertionError("the error reached the first rank alone")


class _OfAUser(ValueError):
    """As many clients have them: made of more than its text, which is all that pickle keeps."""

    def __init__(self, *, status: int) -> None:
        super().__init__(f"the judge answers {status}")


class _Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("the connection is broken")
        self.connection = open(os.devnull, encoding="ascii")  # noqa: SIM115


@on_ranks(2)
def test_an_error_that_cannot_be_sent_is_said_on_every_rank():
    def ask() -> None:
        raise _OfAUser(status=429)

    with pytest.raises(ValueError, match="_OfAUser: the judge answers 429"):
        from_first_rank(ask)

    def lose() -> None:
        raise _Unsendable

    with pytest.raises(RuntimeError, match="_Unsendable: the connection is broken"):
        from_first_rank(lose)


@on_ranks(2)
def test_all_return_only_after_all_have_called():
    if dist.get_rank() == 1:
        time.sleep(0.5)
    begin = time.monotonic()
    from_first_rank(lambda: None)
    if dist.get_rank() == 0:
        assert time.monotonic() - begin > 0.2


@on_ranks(2)
def test_no_group_of_the_policy_has_a_limit_of_its_own():
    """torch's limits of 10 and 30 minutes would end a run whose longest response takes longer."""
    from megatron_rl.policy import parallel
    from tests.numerics.policy_cases import parallel as layout

    before = set(dist.distributed_c10d._world.pg_map)
    parallel.initialize(layout(tensor=2))
    groups = set(dist.distributed_c10d._world.pg_map) - before
    limits = [
        group._get_backend(torch.device("cpu")).options._timeout
        for group in groups
        if isinstance(group, dist.ProcessGroup)
    ]
    assert limits and set(limits) == {NO_LIMIT}, limits
    assert timedelta(days=300) < NO_LIMIT
