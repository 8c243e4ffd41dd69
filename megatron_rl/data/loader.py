"""An endless, resumable stream of prompts."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megatron_rl.types import Prompt


class PromptLoader:
    """Passes over ``prompts`` without end, each epoch in its own order.

    The order depends on (seed, epoch) only, never on the global random state, so that every rank
    draws the same prompts and a resumed run draws those the interrupted one would have.

    Example: prompts a b c with ``shuffle=False``: ``take(2)`` is [a, b], then ``take(2)`` is [c, a].
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
        return _told_apart(taken)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, with what identifies its data: plain picklable values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._fingerprint,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError as ``restore`` does; nothing is changed."""
        for key, mine in (
            ("prompts", self._fingerprint),
            ("seed", self._seed),
            ("shuffle", self._shuffle),
        ):
            if state.get(key) != mine:
                raise ValueError(
                    f"resume: the checkpoint's data position was taken with {key} = {state.get(key)}, "
                    f"this run has {mine}; resume with the same data.train, data.train_weights, "
                    "data.shuffle and seed, or start with resume=never in a new run_dir"
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other prompts, another seed or another order.
        """
        self.check(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class WeightedLoader:
    """Several sources in fixed shares: a stream of its own passes over each, and they take turns.

    The next prompt comes from the source that is furthest behind its share (of equal ones the
    first), so that after any number n of prompts no source is a whole prompt ahead of its share of
    n. Which source it is depends on the weights alone, which of its prompts on (seed, epoch of that
    source).

    Example: weights 3 and 1 take a a b a, a a b a, ... A source that is small beside its weight is
    passed over more often.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Prompt]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """Raises ValueError for a source without prompts; the weights need not sum to 1."""
        assert len(sources) == len(weights) and all(weight > 0 for weight in weights)
        for number, source in enumerate(sources, start=1):
            if not source:
                raise ValueError(
                    f"data.train: no prompt of entry {number} is left, and it has a weight; give "
                    "other data, or leave it out"
                )
        self._streams = [PromptLoader(source, seed=seed, shuffle=shuffle) for source in sources]
        # Exact fractions: sums of floating-point numbers would decide ties by their rounding.
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._weights = list(weights)
        self._taken = [0] * len(sources)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts of the mixture."""
        prompts: list[Prompt] = []
        for _ in range(n):
            source = self._next_source()
            self._taken[source] += 1
            prompts += self._streams[source].take(1)
        return _told_apart(prompts)

    def _next_source(self) -> int:
        number = sum(self._taken) + 1
        behind = [
            share * number - taken for share, taken in zip(self._shares, self._taken, strict=True)
        ]
        return behind.index(max(behind))

    def state(self) -> dict[str, Any]:
        """Where each source stands, with the weights: plain picklable values."""
        return {
            "weights": self._weights,
            "taken": list(self._taken),
            "sources": [stream.state() for stream in self._streams],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other prompts, weights, another seed or another order.
        """
        if state.get("weights") != self._weights:
            raise ValueError(
                "resume: the checkpoint's data position was taken with data.train_weights = "
                f"{state.get('weights')}, this run has {self._weights}; resume with the same, or start "
                "with resume=never in a new run_dir"
            )
        parts = list(zip(self._streams, state["sources"], strict=True))
        for stream, mine in parts:
            stream.check(mine)  # all of them, before the first is moved
        for stream, mine in parts:
            stream.restore(mine)
        self._taken = list(state["taken"])


def _told_apart(prompts: list[Prompt]) -> list[Prompt]:
    """A prompt that comes again in one portion is called ``<uid>#2``, ``#3``, ...

    The engine draws by (seed of the step, uid): under one uid the second group would be a copy of
    the first, response by response, and a step would count the same evidence twice.
    """
    seen: Counter[str] = Counter()
    named = []
    for prompt in prompts:
        seen[prompt.uid] += 1
        times = seen[prompt.uid]
        named.append(prompt if times == 1 else replace(prompt, uid=f"{prompt.uid}#{times}"))
    return named


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.token_ids, prompt.answer)).encode())
    return f"{len(prompts)}:{digest.hexdigest()[:16]}"
