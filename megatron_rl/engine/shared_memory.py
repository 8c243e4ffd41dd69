"""Names for the shared-memory segments between the tensor-parallel ranks of a CPU engine.

Under the external launcher vLLM gives them one constant name: two jobs on a host collide, and a
killed job leaves segments that stop the next one. Here each launch has names of its own, and a name
exists only while the engine starts: once every rank has mapped a segment, the name is not needed. A
lock file, locked for that time, distinguishes a live launch from a dead one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

DIRECTORY = Path("/dev/shm")
PREFIX = "megatron_rl-"


@contextmanager
def private_segments(launch_id: str) -> Iterator[None]:
    """Collective. Segments created inside get names unique to ``launch_id``.

    Segments of dead launches of this project are removed before, this launch's names after.
    """
    assert launch_id.isalnum(), (
        f"launch id {launch_id!r}: letters and digits only, it becomes part of a file name"
    )
    from vllm.distributed.device_communicators.cpu_communicator import (
        _CPUSHMDistributed as Communicator,
    )

    original = Communicator.make_group_name
    remove_dead_launches()
    lock = _lock(_lock_path(launch_id))
    Communicator.make_group_name = staticmethod(
        lambda group: f"{PREFIX}{launch_id}-{group.unique_name}-{group.ranks[0]}"
    )
    try:
        dist.barrier()
        yield
        dist.barrier()
    finally:
        Communicator.make_group_name = original
        _remove_segments(launch_id)
        os.close(lock)
    dist.barrier()
    _lock_path(launch_id).unlink(missing_ok=True)


def remove_dead_launches() -> list[str]:
    """Removes segments and lock files of launches without a live process; returns their ids."""
    return [launch_id for launch_id in sorted(_launches()) if _remove_if_dead(launch_id)]


def _launches() -> set[str]:
    """Launch ids of all segments and lock files of this project and this user."""
    if not DIRECTORY.is_dir():
        return set()
    names = [path.name for path in DIRECTORY.glob(f"{PREFIX}*") if _owner(path) == os.getuid()]
    return {name.removeprefix(PREFIX).split("-")[0].removesuffix(".lock") for name in names}


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:  # its launch removed it between listing and now
        return None


def _remove_if_dead(launch_id: str) -> bool:
    """Whether no process of the launch held its lock, which the kernel drops with a process.

    The lock is kept while removing, so that a launch that is just starting waits and then finds its
    lock file gone.
    """
    try:
        descriptor = os.open(_lock_path(launch_id), os.O_RDWR)
    except FileNotFoundError:  # segments never exist without it in a live launch
        _remove_segments(launch_id)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_segments(launch_id)
        _lock_path(launch_id).unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """A descriptor that holds a shared lock on ``path``."""
    # Another launch may remove the file between open and flock: then a lock on a deleted file
    # would protect nothing, and a new file is made.
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _lock_path(launch_id: str) -> Path:
    return DIRECTORY / f"{PREFIX}{launch_id}.lock"


def _remove_segments(launch_id: str) -> None:
    for path in DIRECTORY.glob(f"{PREFIX}{launch_id}-*"):
        path.unlink(missing_ok=True)
