"""What runs on ranks reads like one process, and what fails there fails that test alone."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import call, on_ranks

state: list[str] = []


@on_ranks(2)
def test_a_test_runs_on_every_rank():
    total = torch.full((1,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    assert total.item() == 3 and dist.get_world_size() == 2


@on_ranks(2)
@pytest.mark.parametrize("number", [3, 4])
def test_fixtures_and_parameters_reach_the_ranks(tmp_path: Path, number: int):
    (tmp_path / str(dist.get_rank())).write_text(str(number))
    dist.barrier()
    assert {file.read_text() for file in tmp_path.iterdir()} == {str(number)}


def numbered(base: int, *, factor: int = 1) -> int:
    return base + factor * dist.get_rank()


def test_values_come_in_rank_order():
    assert call(3, numbered, 10, factor=2) == [10, 12, 14]


def only(rank: int, what: str) -> None:
    """One rank fails in a way of its own; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        if what == "raise":
            raise KeyError("a key")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "odd":

            class Odd(Exception):
                def __reduce__(self):
                    raise TypeError("not to be pickled")

            raise Odd("something odd")
        time.sleep(600)
    dist.barrier()


def test_the_first_failure_is_raised_with_its_rank_and_traceback():
    with pytest.raises(KeyError, match="a key") as raised:
        call(2, only, 1, "raise")
    (note,) = raised.value.__notes__
    assert note.startswith("rank 1 of 2 in tests.test_ranks.only:\nTraceback")
    assert 'raise KeyError("a key")' in note


def test_an_exception_that_cannot_be_pickled_comes_as_text():
    with pytest.raises(RuntimeError, match=r"^Odd: something odd\n"):
        call(2, only, 0, "odd")


def test_a_killed_rank_is_named():
    with pytest.raises(AssertionError, match=r"^rank 1 in .*\.only: exit code -9"):
        call(2, only, 1, "kill")


def test_a_rank_that_hangs_is_named_with_the_place_where_it_stands():
    started = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"^ranks \[0, 1\] in .* did not end in time"
    ) as raised:
        call(2, only, 1, "hang", timeout=2)
    assert "in only" in str(raised.value)
    assert time.monotonic() - started < 30


def spoil() -> int:
    """Everything that a rank may leave behind."""
    state.append("spoiled")
    os.environ["SPOILED"] = "1"
    torch.set_default_dtype(torch.float64)
    random.seed(99)
    dist.new_group([0])
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def clean() -> tuple[object, ...]:
    groups = len(dist.distributed_c10d._world.pg_map)
    return state, os.environ.get("SPOILED"), torch.get_default_dtype(), random.random(), groups


def test_nothing_of_a_call_reaches_the_next():
    before = call(2, clean)
    children = call(2, spoil)
    assert call(2, clean) == before
    assert before[0][:3] == ([], None, torch.float32)
    assert not [child for child in children if Path(f"/proc/{child}").exists() and running(child)]


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_function_that_has_no_name_of_its_own_is_refused():
    with pytest.raises(AssertionError, match="cannot be found by name"):
        call(2, lambda: None)
