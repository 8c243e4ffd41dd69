"""A folder belongs to one live process. Real processes: record locks do not exist inside one."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.runtime.guard import lock
from tests.launch import REPO, end

HOLD = """
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {repo!r})
from megatron_rl.runtime.guard import lock
lock.hold(Path(sys.argv[1]), "first")
lock.hold(Path(sys.argv[1]), "first")
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(orphan.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    command = [sys.executable, "-c", HOLD.format(repo=str(REPO)), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.orphan = int(process.stdout.readline())
    yield process
    subprocess.run(["kill", str(process.orphan)], check=False, capture_output=True)
    end(process)


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    with pytest.raises(
        ValueError,
        match=(
            rf"run_dir = .*: another run is using it .*process {holder.pid}, launch first, since 20"
        ),
    ):
        lock.hold(tmp_path, "second")
    with pytest.raises(ValueError, match="launch first"):
        lock.hold(tmp_path, "second")


def test_a_dead_holder_does_not_block_though_its_child_lives(tmp_path, holder):
    holder.kill()
    holder.wait()
    time.sleep(0.05)
    assert Path(f"/proc/{holder.orphan}").exists()
    lock.hold(tmp_path, "second")
    assert '"launch": "second"' in (tmp_path / lock.NAME).read_text()


def test_holding_twice_does_not_give_the_lock_away(tmp_path):
    """Closing any descriptor of the file would: the second call must not open it."""
    lock.hold(tmp_path, "mine")
    lock.hold(tmp_path, "mine")
    attempt = [sys.executable, "-c", HOLD.format(repo=str(REPO)), str(tmp_path)]
    done = subprocess.run(attempt, capture_output=True, text=True, timeout=30, check=False)
    assert "launch mine" in done.stderr


def test_a_folder_without_a_readable_signature_is_refused_all_the_same(tmp_path, holder):
    (tmp_path / lock.NAME).write_text("not JSON")
    with pytest.raises(ValueError, match="a process that has not signed yet"):
        lock.hold(tmp_path, "second")


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "lockf", no_locks)
    lock.hold(tmp_path, "mine")
    assert "has no locks" in caplog.text and "would not be noticed" in caplog.text


def test_one_may_ask_who_holds_a_folder_without_taking_it(tmp_path, holder):
    assert lock.holder(tmp_path / "none") is None
    assert f"process {holder.pid}, launch first, since 20" in (lock.holder(tmp_path) or "")
    holder.kill()
    holder.wait()
    assert lock.holder(tmp_path) is None, "its signature is still there"
    lock.hold(tmp_path, "second")
