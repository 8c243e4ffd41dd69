"""Servers that register, fall silent and are removed; the secret of the run."""

import errno
import logging
import os
import shutil
import stat
from pathlib import Path

import pytest

from megatron_rl.runtime.registry import Lease, Registration, Registry, run_secret


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_server_is_there_for_as_long_as_it_writes(tmp_path, clock):
    registry = Registry(tmp_path, clock)
    assert registry.look() == {}
    lease = Lease(tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    assert registry.look()["a"].url == "http://127.0.0.1:1"
    for clock.now in (9.0, 18.0, 27.0):
        lease.renew()
        assert list(registry.look()) == ["a"]
    clock.now = 36.9
    assert list(registry.look()) == ["a"]
    clock.now = 37.1
    assert registry.look() == {}, "silent since 27"
    lease.renew()
    assert list(registry.look()) == ["a"], "it was only slow"
    lease.end()
    assert registry.look() == {}


def test_clocks_of_servers_do_not_matter(tmp_path, clock):
    """One that has written before the trainer started counts from when the trainer sees it."""
    Lease(tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    clock.now = 1e6
    registry = Registry(tmp_path, clock)
    assert list(registry.look()) == ["a"]
    clock.now += 11.0
    assert registry.look() == {}


def test_a_copy_of_the_folder_has_no_servers(tmp_path, clock, caplog):
    """The server is that of another run; where two numbers name one folder it is seen to write."""
    first, copy = tmp_path / "run", tmp_path / "copy"
    lease = Lease(first, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    shutil.copytree(first, copy)
    registry = Registry(copy, clock)
    assert list(Registry(first, clock).look()) == ["a"] and registry.look() == {}
    assert "a copy, and does not write here; it is not used" in caplog.text
    lease.renew()
    shutil.copy(first / "a.json", copy / "a.json")
    assert list(registry.look()) == ["a"]


def test_a_removed_server_learns_it_and_does_not_come_back(tmp_path, clock):
    registry = Registry(tmp_path, clock)
    lease = Lease(tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    other = Lease(tmp_path, Registration("b", "http://127.0.0.1:2", 0, lease_s=10.0))
    registry.remove("a")
    lease.renew()
    assert not lease.is_held and other.is_held
    assert list(registry.look()) == ["b"]
    Lease(
        tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0)
    )  # as if it wrote at that moment
    assert list(registry.look()) == ["b"]
    assert not lease.is_held, "so it learns it at its next beat"


def test_a_server_takes_the_place_of_one_that_was_killed_at_its_address(tmp_path, clock):
    """One server under two names would be sent weights, and asked, as if it were two."""
    killed = Lease(tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    Lease(tmp_path, Registration("b", "http://127.0.0.1:2", 0, lease_s=10.0))
    (tmp_path / "half.json").write_text('{"name": "half"')
    Lease(tmp_path, Registration("c", "http://127.0.0.1:1", 0, lease_s=10.0))
    assert list(Registry(tmp_path, clock).look()) == ["b", "c"]
    assert not killed.is_held and (tmp_path / "half.json").exists()


def test_a_file_that_is_replaced_while_it_is_read_is_that_of_before(tmp_path, clock, monkeypatch):
    """On NFS the old file is stale for who has opened it."""
    registry = Registry(tmp_path, clock)
    Lease(tmp_path, Registration("a", "http://127.0.0.1:1", 0, lease_s=10.0))
    known = registry.look()
    Lease(tmp_path, Registration("b", "http://127.0.0.1:2", 0, lease_s=10.0))

    def stale(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", stale)
        assert registry.look() == known
        clock.now = 10.1
        assert registry.look() == {}, "it does not count as a beat"
    assert sorted(registry.look()) == ["b"]


def test_files_of_others_are_told_once_and_not_used(tmp_path, clock, caplog):
    (tmp_path / "half.json").write_text('{"name": "half"')
    (tmp_path / "other.json").write_bytes(
        b'{"name": "../x", "url": "x", "beat": 0, "lease_s": 1.0}'
    )
    registry = Registry(tmp_path, clock)
    with caplog.at_level(logging.WARNING):
        assert registry.look() == {} == registry.look()
    assert len(caplog.records) == 2
    assert "half.json sent a message that is not of the schema" in caplog.text
    assert "other.json: names a server ../x" in caplog.text


def test_a_server_of_other_settings_is_named_once_and_not_used(tmp_path, clock, caplog):
    def lease(name: str, settings: dict[str, str]) -> None:
        Lease(tmp_path, Registration(name, f"at {name}", 0, 10.0, settings))

    lease("as_the_run", {"rollout.dtype": "bfloat16", "rollout.anneal": "on"})
    lease("plain", {"rollout.dtype": "bfloat16"})
    lease("float", {"rollout.dtype": "float32", "rollout.anneal": "on"})
    registry = Registry(
        tmp_path, clock, settings={"rollout.dtype": "bfloat16", "rollout.anneal": "on"}
    )
    with caplog.at_level(logging.WARNING):
        assert list(registry.look()) == ["as_the_run"] == list(registry.look())
    assert len(caplog.records) == 2
    assert "server float: rollout.dtype = float32, this run has bfloat16: start" in caplog.text
    assert "server plain: rollout.anneal = unknown, this run has on" in caplog.text
    plain = Registry(tmp_path, clock, settings={"rollout.dtype": "bfloat16"})
    assert list(plain.look()) == ["as_the_run", "plain"], "one that can anneal serves all"


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path):
    folder = tmp_path / "servers"
    secret = run_secret(folder)
    assert len(secret) == 64 and run_secret(folder) == secret
    path = folder / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(entry.name for entry in folder.iterdir()) == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ValueError, match="others can read the secret"):
        run_secret(folder)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty; remove it"):
        run_secret(folder)
