"""One process group over processes that were not launched together: the ranks of a trainer and the workers of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

POLL_S = 0.002


class JointGroupError(RuntimeError):
    """A step that needs every process of a joint group cannot begin. The message says what is wrong, and where."""


class Meeting:
    """Lets processes begin a collective step only when all of them are there and well, so that none waits in it for one that is not.

    Every process but the first calls ``arrive``; the first calls ``open``. A step has a name of its own.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def arrive(self, step: str, rank: int, problem: str = "") -> None:
        """Waits for the verdict of ``open``. Raises JointGroupError, on every process, when any of them has a problem."""
        self.store.set(f"{step}/{rank}", problem)
        verdict = self.store.get(f"{step}/verdict").decode()
        if verdict:
            raise JointGroupError(verdict)

    def open(self, step: str, ranks: Sequence[int], alive: Callable[[], str]) -> None:
        """Waits until all ``ranks`` have arrived or ``alive()`` returns a reason why they will not. Raises as ``arrive`` does."""
        keys = [f"{step}/{rank}" for rank in ranks]
        verdict = ""
        while not verdict and not self.store.check(keys):
            verdict = alive()
            time.sleep(POLL_S)
        if not verdict:
            problems = {rank: self.store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}
            verdict = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items() if problem)
        self.store.set(f"{step}/verdict", verdict)
        if verdict:
            raise JointGroupError(verdict)


def host_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A store served by this process at a free port (``.port``). Not through torch's rendezvous: under torchrun that would look for the
    agent's store instead of serving one."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def visit_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process serves."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """Collective over the ``size`` processes that share ``store``: gloo for the host's memory, NCCL for that of a GPU.

    torch.distributed must be initialised, in each process with whatever world it has; its functions take the group as any other.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType
    group._set_default_backend(kind.GLOO)
    group._register_backend(
        torch.device("cpu"), kind.GLOO, dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout=timeout)
    )
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
        group._register_backend(torch.device("cuda", torch.cuda.current_device()), kind.NCCL, backend)
    # torch finds a process in a group by its rank in its own world, which here is unique in that world only. The others are never
    # looked up by theirs, so any names do for them as long as the own one is right.
    own = dist.get_rank()
    distributed_c10d._world.pg_group_ranks[group] = {(i - rank + own) % size: i for i in range(size)}
    return group


def leave_group(group: dist.ProcessGroup) -> None:
    """Closes the connections of this process."""
    distributed_c10d._world.pg_group_ranks.pop(group, None)
    group.shutdown()
