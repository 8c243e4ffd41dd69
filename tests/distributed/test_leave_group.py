"""A process that leaves a group closes its connections, whatever error it met before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import LostPeerError
from megatron_rl.runtime.joint_group import connect_store, join_group, leave_group, serve_store
from megatron_rl.weight_sync.collectives import raise_everywhere
from tests.ranks import on_ranks

TIMEOUT_S = 30.0


def joined() -> dist.ProcessGroup:
    rank = dist.get_rank()
    store = serve_store("127.0.0.1", TIMEOUT_S) if rank == 0 else None
    ports = [None if store is None else store.port]
    dist.broadcast_object_list(ports)
    store = store or connect_store("127.0.0.1", ports[0], TIMEOUT_S)
    group = join_group(store, rank, 3, TIMEOUT_S)
    dist.all_reduce(torch.zeros(1), group=group)
    return group


def wait_for_rank_1(group: dist.ProcessGroup) -> None:
    dist.recv(torch.zeros(1), dist.get_global_rank(group, 1), group=group)


@pytest.mark.parametrize("own", [None, ValueError("of its own")], ids=["lost", "also its own"])
@on_ranks(3)
def test_peers_learn_at_once_that_a_process_has_left(own: Exception | None) -> None:
    """Rank 2 leaves, rank 1 notices and leaves too, and rank 0 waits for rank 1, which still has
    the error. No process ends before: that would close its connections."""
    group = joined()
    if dist.get_rank() == 2:
        leave_group(group)
        del group
        dist.barrier()
    elif dist.get_rank() == 1:
        try:
            raise_everywhere(own, "advice", group)
        except LostPeerError as error:
            leave_group(group, error)
            del group
            dist.barrier()
    else:
        with pytest.raises(RuntimeError) as caught:
            wait_for_rank_1(group)
        assert "Timed out" not in str(caught.value)
        dist.barrier()
