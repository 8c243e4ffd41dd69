"""One process wins, and when it dies without a word the next one does."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.runtime.guard import first_failure as first_failure_file
from megatron_rl.runtime.guard.first_failure import FirstFailure, alive, create


def test_one_of_many_wins(tmp_path):
    claims_of_ranks = [FirstFailure(tmp_path) for _ in range(32)]
    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(FirstFailure.claim, claims_of_ranks))
    assert sum(won) == 1
    assert claims_of_ranks[0].pending()
    claims_of_ranks[won.index(True)].mark_reported()
    assert all(first_failure.decided() for first_failure in claims_of_ranks)
    assert not claims_of_ranks[0].pending()


def test_a_winner_that_died_without_a_word_is_followed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    create(tmp_path / "first_failure_0", str(dead.pid))
    first_failure = FirstFailure(tmp_path)
    assert not first_failure.pending()
    assert first_failure.claim()
    assert not FirstFailure(tmp_path).claim()


def test_a_winner_that_said_it_and_left_has_won(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    create(tmp_path / "first_failure_0", str(dead.pid))
    create(tmp_path / "failure_reported", str(dead.pid))
    assert not FirstFailure(tmp_path).claim()


def test_without_a_folder_everybody_wins_and_without_a_disk_too(tmp_path):
    assert FirstFailure(None).claim()
    assert FirstFailure(tmp_path / "gone").claim()


def test_the_first_of_a_machine_need_not_be_the_first_of_all(tmp_path):
    first_failure = FirstFailure(tmp_path, elsewhere=lambda: False)
    assert not first_failure.claim()
    assert first_failure.lost_elsewhere
    assert first_failure.decided()  # the others of this machine keep still, too


def test_a_store_that_does_not_answer_costs_no_message(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr(first_failure_file, "STORE_S", 0.1)
    never = threading.Event()
    assert FirstFailure(tmp_path, elsewhere=never.wait).claim()


def test_a_process_that_ended_and_was_not_collected_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(child.pid)
    child.wait()
    assert alive(os.getpid())


def test_all_ranks_have_arrived(tmp_path, monkeypatch):
    first_failure = FirstFailure(tmp_path, size=2)
    for pid in (1001, 1001, 1002):
        assert not first_failure.complete()
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        first_failure.arrive()
    assert first_failure.complete()
    assert FirstFailure(None, size=2).complete()  # nobody to wait for
