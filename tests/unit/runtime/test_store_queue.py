"""Messages between ranks: each comes once, in the order of its writer, and no rank waits."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.rollouts.backends.launch import StoreQueue
from megatron_rl.runtime.launch import World
from tests.ranks import on_ranks


def test_a_world_of_one_writes_to_itself() -> None:
    queues = StoreQueue(World(0, 1, 0, "test"))
    assert queues.receive("a") == []
    queues.send("a", 1)
    queues.send("b", 2)
    queues.send("a", [3])
    assert queues.receive("a") == [1, [3]]
    assert queues.receive("a") == [] and queues.receive("b") == [2]


@on_ranks(3)
def test_messages_of_several_writers_come_once_and_in_the_order_of_each() -> None:
    rank = dist.get_rank()
    queues = StoreQueue(World(rank, 3, rank, "test", dist.group.WORLD))
    assert queues.receive("rank 0") == [], "looking does not wait"
    dist.barrier()
    if rank > 0:
        for number in range(20):
            queues.send("rank 0", (rank, number))
        dist.barrier()
        return
    messages = []
    while len(messages) < 40:
        messages += queues.receive("rank 0")
    dist.barrier()
    assert queues.receive("rank 0") == []
    for writer in (1, 2):
        expected = [(writer, number) for number in range(20)]
        assert [message for message in messages if message[0] == writer] == expected
