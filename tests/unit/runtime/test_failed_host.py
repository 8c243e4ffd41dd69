"""Which machine a rank names when it is the first to fail."""

from __future__ import annotations

import socket

import pytest

from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.failure import FailureMessage
from megatron_rl.runtime.guard.first_failure import FAILED_HOST, FirstFailure, note_failed_host


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where this process, a rank alone, names the machine."""
    monkeypatch.setattr(failure.STATE, "failed_host", tmp_path / FAILED_HOST)
    monkeypatch.setattr(failure.STATE, "first_failure", FirstFailure(None))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return tmp_path / FAILED_HOST


def test_the_machine_that_is_named_first_stays(file):
    note_failed_host(file, "")
    note_failed_host(file, "node1")
    assert file.read_text() == "\n"
    assert list(file.parent.iterdir()) == [file]


def test_the_first_rank_to_fail_names_a_machine(file):
    assert failure.say_or_follow(FailureMessage("error: x"), host=socket.gethostname()) == 1
    assert file.read_text() == f"{socket.gethostname()}\n"


def test_a_rank_that_knows_of_no_machine_names_none(file):
    """srun may know one."""
    failure.say_or_follow(FailureMessage("error: Connection closed by peer"))
    assert not file.exists()
