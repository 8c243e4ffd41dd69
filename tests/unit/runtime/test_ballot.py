"""One process wins, and when it dies without a word the next one does."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.runtime.guard import ballot as ballot_file
from megatron_rl.runtime.guard.ballot import Ballot, alive, create


def test_one_of_many_wins(tmp_path):
    ballots = [Ballot(tmp_path) for _ in range(32)]
    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(Ballot.win, ballots))
    assert sum(won) == 1
    assert ballots[0].pending()
    ballots[won.index(True)].said()
    assert all(ballot.decided() for ballot in ballots)
    assert not ballots[0].pending()


def test_a_winner_that_died_without_a_word_is_followed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    create(tmp_path / "first_failure_0", str(dead.pid))
    ballot = Ballot(tmp_path)
    assert not ballot.pending()
    assert ballot.win()
    assert not Ballot(tmp_path).win()


def test_a_winner_that_said_it_and_left_has_won(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    create(tmp_path / "first_failure_0", str(dead.pid))
    create(tmp_path / "failure_said", str(dead.pid))
    assert not Ballot(tmp_path).win()


def test_without_a_folder_everybody_wins_and_without_a_disk_too(tmp_path):
    assert Ballot(None).win()
    assert Ballot(tmp_path / "gone").win()


def test_the_first_of_a_machine_need_not_be_the_first_of_all(tmp_path):
    ballot = Ballot(tmp_path, elsewhere=lambda: False)
    assert not ballot.win()
    assert ballot.lost_elsewhere
    assert ballot.decided()  # the others of this machine keep still, too


def test_a_store_that_does_not_answer_costs_no_message(tmp_path, monkeypatch):
    import threading

    monkeypatch.setattr(ballot_file, "STORE_S", 0.1)
    never = threading.Event()
    assert Ballot(tmp_path, elsewhere=never.wait).win()


def test_a_process_that_ended_and_was_not_collected_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(child.pid)
    child.wait()
    assert alive(os.getpid())


def test_all_ranks_have_arrived(tmp_path, monkeypatch):
    ballot = Ballot(tmp_path, size=2)
    for pid in (1001, 1001, 1002):
        assert not ballot.complete()
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        ballot.arrive()
    assert ballot.complete()
    assert Ballot(None, size=2).complete()  # nobody to wait for
