"""Names for the shared-memory segments between the tensor-parallel ranks of a CPU engine.

Under the external launcher vLLM gives them one constant name: two jobs on a host collide, and a
killed job leaves segments that stop the next one. Here each launch has names of its own, and a name
exists only while the engine starts: once every rank has mapped a segment, the name is not needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

DIRECTORY = Path("/dev/shm")
PREFIX = "megatron_rl-"
_OLD_S = 3600.0  # no start of an engine takes as long


@contextmanager
def private_segments(launch_id: str) -> Iterator[None]:
    """Collective. Segments created inside get names unique to ``launch_id``, which are removed
    after; those that a launch left which was killed inside are removed an hour later."""
    assert launch_id.isalnum(), (
        f"launch id {launch_id!r}: letters and digits only, it becomes part of a file name"
    )
    from vllm.distributed.device_communicators.cpu_communicator import (
        _CPUSHMDistributed as Communicator,
    )

    original = Communicator.make_group_name
    remove_old_segments()
    Communicator.make_group_name = staticmethod(
        lambda group: f"{PREFIX}{launch_id}-{group.unique_name}-{group.ranks[0]}"
    )
    try:
        dist.barrier()
        yield
        dist.barrier()  # every rank has mapped them
    finally:
        Communicator.make_group_name = original
        for path in DIRECTORY.glob(f"{PREFIX}{launch_id}-*"):
            path.unlink(missing_ok=True)


def remove_old_segments() -> None:
    """Removes segments of this project and this user that a killed start of an engine left."""
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another launch removes it, too
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S:
                path.unlink()
