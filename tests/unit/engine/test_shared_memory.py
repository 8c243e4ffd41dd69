"""What a dead launch left is removed; what a live one uses, and what is not ours, is not."""

import signal
import subprocess
import sys
import uuid

import pytest

from megatron_rl.engine import shared_memory
from megatron_rl.engine.shared_memory import DIRECTORY, PREFIX, remove_dead_launches

HOLDER = """
import sys, time
from megatron_rl.engine import shared_memory
lock = shared_memory._lock(shared_memory._lock_path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def launch_id():
    name = uuid.uuid4().hex[:12]
    yield name
    for path in DIRECTORY.glob(f"*{name}*"):
        path.unlink()


def make_segments(launch_id):
    paths = [DIRECTORY / f"{PREFIX}{launch_id}-tp:0-0_{rank}" for rank in range(2)]
    for path in paths:
        path.write_bytes(b"0")
    return paths


def test_a_launch_lives_until_its_last_process_dies(launch_id):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, launch_id], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        assert all(holder.stdout.readline() == b"locked\n" for holder in holders)
        paths = make_segments(launch_id)
        for holder in holders:
            assert launch_id not in remove_dead_launches() and all(path.exists() for path in paths)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        assert launch_id in remove_dead_launches()
        assert not list(DIRECTORY.glob(f"*{launch_id}*"))
        assert launch_id not in remove_dead_launches()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()


def test_segments_without_a_lock_file_are_of_a_dead_launch(launch_id):
    paths = make_segments(launch_id)
    assert launch_id in remove_dead_launches() and not any(path.exists() for path in paths)


def test_files_of_others_stay(launch_id):
    other = DIRECTORY / f"other-{launch_id}-tp:0-0_0"
    other.write_bytes(b"0")
    remove_dead_launches()
    assert other.exists()


def test_a_lock_taken_on_a_file_that_is_gone_is_taken_again(launch_id, monkeypatch):
    """Another launch may find the new lock file before it is locked, and remove it as one left by
    the dead."""
    path = shared_memory._lock_path(launch_id)
    flock, calls = shared_memory.fcntl.flock, []

    def too_late(descriptor, kind):
        if not calls:
            path.unlink()
        calls.append(kind)
        flock(descriptor, kind)

    monkeypatch.setattr(shared_memory.fcntl, "flock", too_late)
    descriptor = shared_memory._lock(path)
    monkeypatch.undo()
    assert len(calls) == 2 and path.stat().st_ino == shared_memory.os.fstat(descriptor).st_ino
    assert launch_id not in remove_dead_launches()
    shared_memory.os.close(descriptor)
