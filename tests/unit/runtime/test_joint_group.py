"""A joint group over NCCL: a peer that dies is an error that is raised, not the end of the process.

What torch's own group does in which environment is played here; no GPU is asked.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import LostPeerError
from megatron_rl.runtime.joint_group import join_group, leave_group
from megatron_rl.weight_sync import collectives


class Flag:
    """A result on a device whose sender is gone: the host would wait for it."""

    def __bool__(self) -> bool:
        raise AssertionError("the host waits until the watchdog ends the process")


class Nccl:
    """One whose peer never comes. How it waits follows from the environment that it is made in."""

    Options = SimpleNamespace
    made: Nccl

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Any) -> Any:
        cls.made = made = object.__new__(cls)
        made.blocks = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        made.ends_the_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        made.limit_s = options._timeout.total_seconds()
        return dist.ProcessGroupGloo(dist.PrefixStore("played/", store), rank, size)

    def wait(self) -> None:
        if self.blocks:
            raise dist.DistBackendError(f"timed out after {self.limit_s} s")


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    joined = join_group(dist.HashStore(), 0, 1, 7.0)
    yield joined
    leave_group(joined)
    dist.destroy_process_group()


def test_a_peer_that_dies_is_raised_in_time(group, monkeypatch):
    monkeypatch.setattr(collectives, "torch", SimpleNamespace(tensor=lambda *_, **__: Flag()))
    monkeypatch.setattr(dist, "all_reduce", lambda flag, group: Nccl.made.wait())
    with pytest.raises(LostPeerError, match=r"a peer is gone.*timed out after 3\.5 s"):
        collectives.raise_everywhere(None, group=group, device="cuda")
    assert not Nccl.made.ends_the_process
    Nccl.made.blocks = False
    with pytest.raises(AssertionError, match="watchdog"):
        collectives.raise_everywhere(None, group=group, device="cuda")


def test_other_groups_are_made_in_the_environment_of_before(group, monkeypatch):
    names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert not any(name in os.environ for name in names)
    monkeypatch.setenv(names[1], "1")
    leave_group(join_group(dist.HashStore(), 0, 1, 7.0))
    assert Nccl.made.blocks and os.environ[names[1]] == "1" and names[0] not in os.environ
