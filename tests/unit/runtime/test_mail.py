"""Letters between ranks: each comes once, in the order of its writer, and nobody waits."""

from __future__ import annotations

import torch.distributed as dist
from megatron_rl.runtime.mail import Mail

from megatron_rl.runtime.launch import World
from tests.ranks import on_ranks


def test_a_world_of_one_writes_to_itself() -> None:
    mail = Mail(World(0, 1, 0, "test"))
    assert mail.receive("a") == []
    mail.send("a", 1)
    mail.send("b", 2)
    mail.send("a", [3])
    assert mail.receive("a") == [1, [3]]
    assert mail.receive("a") == [] and mail.receive("b") == [2]


@on_ranks(3)
def test_letters_of_several_writers_come_once_and_in_the_order_of_each() -> None:
    rank = dist.get_rank()
    mail = Mail(World(rank, 3, rank, "test", dist.group.WORLD))
    assert mail.receive("rank 0") == [], "looking does not wait"
    dist.barrier()
    if rank > 0:
        for number in range(20):
            mail.send("rank 0", (rank, number))
        dist.barrier()
        return
    letters = []
    while len(letters) < 40:
        letters += mail.receive("rank 0")
    dist.barrier()
    assert mail.receive("rank 0") == []
    for writer in (1, 2):
        expected = [(writer, number) for number in range(20)]
        assert [letter for letter in letters if letter[0] == writer] == expected
