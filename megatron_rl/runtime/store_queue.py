"""Queues of small messages between the ranks of a launch where no collective fits: a rank that has
a message sends it, a rank that has time looks, and none waits."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from typing import Any

import torch.distributed as dist

from megatron_rl.runtime.launch import World


class StoreQueue:
    """Queues by name, each emptied by one rank, in the order in which messages came.

    They go through the store of the launch: a send is two requests to it, a look is one where
    nothing has come. Messages are pickled, as those of the collectives of control are: the store
    serves the ranks of this launch alone. Its calls belong to the main thread.

    Example: ``queues.send("to rank 1", "start")``, and there ``queues.receive("to rank 1")``.
    """

    def __init__(self, world: World) -> None:
        # Any: it takes bytes, though its signature says text.
        self._store: Any = None
        if world.size > 1:
            self._store = dist.distributed_c10d._get_default_store()
        self._here: dict[str, deque[Any]] = defaultdict(deque)  # in a world of one
        self._num_read: dict[str, int] = defaultdict(int)

    def send(self, queue: str, message: Any) -> None:
        if self._store is None:
            self._here[queue].append(message)
            return
        # The number is taken first: several ranks may write to one queue.
        number = self._store.add(_count(queue), 1)
        self._store.set(_key(queue, number), pickle.dumps(message))

    def receive(self, queue: str) -> list[Any]:
        """All that has come since the last time."""
        if self._store is None:
            waiting = list(self._here[queue])
            self._here[queue].clear()
            return waiting
        messages = []
        num_sent = self._store.add(_count(queue), 0)
        for number in range(self._num_read[queue] + 1, num_sent + 1):
            # ``get`` waits for a writer that has its number and not yet written.
            messages.append(pickle.loads(self._store.get(_key(queue, number))))
            self._store.delete_key(_key(queue, number))
        self._num_read[queue] = num_sent
        return messages


def _count(queue: str) -> str:
    return f"megatron_rl/queue/{queue}"


def _key(queue: str, number: int) -> str:
    return f"megatron_rl/queue/{queue}/{number}"
