"""An endless, resumable stream of prompts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.types import Prompt


class PromptLoader:
    """Passes over ``prompts`` without end, each epoch in its own order. The order depends on (seed, epoch) only, never on the
    global random state, so that every rank draws the same prompts and a resumed run draws those the interrupted one would have.

    Example: three prompts a b c with ``shuffle=False``: ``take(2)`` is [a, b], then ``take(2)`` is [c, a].
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("data.train: no prompt to train on; give a source with at least one")
        self._prompts, self._seed, self._shuffle = list(prompts), seed, shuffle
        self._fingerprint = _fingerprint(self._prompts)
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; the end of an epoch is followed by the start of the next."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            rows = self._order[self._position : self._position + n - len(taken)]
            taken += [self._prompts[row] for row in rows]
            self._position += len(rows)
        return taken

    def state(self) -> dict[str, Any]:
        """Where the stream stands, with what identifies its data: plain picklable values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other prompts, another seed or another order.
        """
        for key, mine in (("prompts", self._fingerprint), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != mine:
                raise ValueError(
                    f"resume: the checkpoint's data position was taken with {key} = {state[key]}, this run has {mine}; "
                    "resume with the same data.train, data.shuffle and seed, or start with resume=never in a new run_dir"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.token_ids, prompt.answer)).encode())
    return f"{len(prompts)}:{digest.hexdigest()[:16]}"
