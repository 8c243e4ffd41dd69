"""An endless, resumable stream of prompts."""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megatron_rl.data.prompt_file import StoredPrompts
from megatron_rl.types import Prompt


class PromptLoader:
    """Endless passes over ``prompts``, each epoch in its own order.

    The order depends on (seed, epoch) only, never on the global random state, so that every rank
    draws the same prompts and a resumed run draws those the interrupted one would have.

    Example: of prompts a b c with ``shuffle=False``, ``take(2)`` is [a, b], then [c, a].
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("data.train: no prompt to train on; give a source with at least one")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint(prompts)
        self._epoch = 0
        self._position = 0  # in this epoch's order
        self._order = self._order_of(0)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; the end of an epoch is followed by the start of the next."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == len(self._prompts):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            rows = self._order[self._position : self._position + n - len(taken)]
            taken += [self._prompts[row] for row in rows]
            self._position += len(rows)
        return _with_distinct_uids(taken)

    def state(self) -> dict[str, Any]:
        """The position of the stream and what identifies its data: plain picklable values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._fingerprint,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError as ``restore`` does; changes nothing."""
        own = self.state()
        for key in ("prompts", "seed", "shuffle"):
            if state.get(key) != own[key]:
                raise ValueError(
                    f"resume: the checkpoint's data position was taken with {key} ="
                    f" {state.get(key)}, this run has {own[key]}; resume with the same data.train,"
                    " data.train_weights, data.shuffle and seed, or start with resume=never in a"
                    " new run_dir"
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other prompts, another seed or another order.
        """
        self.check(state)
        self._position = state["position"]
        if self._epoch != state["epoch"]:
            self._epoch = state["epoch"]
            self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # A text as the seed goes through SHA-512, so neighboring seeds and epochs have nothing
            # in common, and every process has the same order, unlike with ``hash``.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class WeightedLoader:
    """Several sources in fixed shares, each with an endless stream of its own.

    The next prompt comes from the source that is furthest behind its share (of equal ones the
    first), so that after any number n of prompts no source is a whole prompt ahead of its share of
    n. Which source it is depends on the weights alone, which of its prompts on (seed, epoch of that
    source).

    Example: weights 3 and 1 take a a b a, a a b a, ... A source that is small for its weight goes
    through more epochs.
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
        return _with_distinct_uids(prompts)

    def _next_source(self) -> int:
        """The source that would be furthest behind its share of all prompts and the next one.

        Example, shares 3/4 and 1/4: of the first prompt they are owed 3/4 and 1/4, so a comes. Of
        two they are owed 3/2 - 1 and 1/2 - 0: equal, so the first one comes again. Of three 9/4 - 2
        and 3/4 - 0: now b.
        """
        num_prompts = sum(self._taken) + 1
        deficits = [
            share * num_prompts - taken
            for share, taken in zip(self._shares, self._taken, strict=True)
        ]
        return deficits.index(max(deficits))

    def state(self) -> dict[str, Any]:
        """The position of each source, and the weights: plain picklable values."""
        return {
            "weights": self._weights,
            "taken": list(self._taken),
            "sources": [stream.state() for stream in self._streams],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken.

        Raises:
            ValueError: the state belongs to other prompts, weights, another seed or another order.
        """
        if state.get("weights") != self._weights:
            raise ValueError(
                "resume: the checkpoint's data position was taken with data.train_weights ="
                f" {state.get('weights')}, this run has {self._weights}; resume with the same, or"
                " start with resume=never in a new run_dir"
            )
        # All are checked before the first one moves.
        for stream, position in zip(self._streams, state["sources"], strict=True):
            stream.check(position)
        for stream, position in zip(self._streams, state["sources"], strict=True):
            stream.restore(position)
        self._taken = list(state["taken"])


def _with_distinct_uids(prompts: list[Prompt]) -> list[Prompt]:
    """``prompts``; one that comes again has the uid ``<uid>#2``, ``<uid>#3``, ...

    The engine draws by (seed of the step, uid): under one uid the second group would be a copy of
    the first, response by response, and a step would count the same evidence twice.
    """
    counts: Counter[str] = Counter()
    distinct = []
    for prompt in prompts:
        counts[prompt.uid] += 1
        distinct.append(numbered(prompt, counts[prompt.uid]))
    return distinct


def numbered(prompt: Prompt, count: int) -> Prompt:
    """The prompt as it comes for the ``count``-th time in a step."""
    if count == 1:
        return prompt
    return replace(prompt, uid=f"{prompt.uid}#{count}")


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Their number and a digest of their order, tokens, answers and images."""
    if isinstance(prompts, StoredPrompts):
        return prompts.fingerprint
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.token_ids, prompt.answer)).encode())
        digest.update("".join(image.digest for image in prompt.images).encode())
    return f"{len(prompts)}:{digest.hexdigest()[:16]}"
