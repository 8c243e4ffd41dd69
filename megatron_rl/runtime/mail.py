"""Small messages between the ranks of a launch where no collective fits: who has something to say
sends it, who has time looks, and nobody waits."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from typing import Any

import torch.distributed as dist

from megatron_rl.runtime.launch import World


class Mail:
    """Boxes with names, each emptied by one rank, in which messages lie in the order they came.

    They go through the store of the launch: a send is two requests to it, a look is one where
    nothing has come. Messages are pickled, as those of the collectives of control are: the store
    serves the ranks of this launch alone. Its calls belong to the main thread.

    Example: ``mail.send("to rank 1", "start")``, and there ``mail.receive("to rank 1")``.
    """

    def __init__(self, world: World) -> None:
        # Any: it takes bytes, though its signature says text.
        self._store: Any = None
        if world.size > 1:
            self._store = dist.distributed_c10d._get_default_store()
        self._here: dict[str, deque[Any]] = defaultdict(deque)  # in a world of one
        self._num_read: dict[str, int] = defaultdict(int)

    def send(self, box: str, message: Any) -> None:
        if self._store is None:
            self._here[box].append(message)
            return
        # The number is taken first: several ranks may write to one box.
        number = self._store.add(_count(box), 1)
        self._store.set(_letter(box, number), pickle.dumps(message))

    def receive(self, box: str) -> list[Any]:
        """All that has come since the last time."""
        if self._store is None:
            letters = list(self._here[box])
            self._here[box].clear()
            return letters
        messages = []
        num_sent = self._store.add(_count(box), 0)
        for number in range(self._num_read[box] + 1, num_sent + 1):
            # ``get`` waits for a writer that has its number and not yet written.
            messages.append(pickle.loads(self._store.get(_letter(box, number))))
            self._store.delete_key(_letter(box, number))
        self._num_read[box] = num_sent
        return messages


def _count(box: str) -> str:
    return f"megatron_rl/mail/{box}"


def _letter(box: str, number: int) -> str:
    return f"megatron_rl/mail/{box}/{number}"
