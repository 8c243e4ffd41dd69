"""Which rank holds the tokens of which row: before and after they travel.

Every rank knows the lengths of all rows, so every rank knows all of this without being told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

Ranks = Int[np.ndarray, " rows"]


@dataclass(frozen=True)
class Route:
    """The way of all rows of a step. ``lengths``: response tokens of each row; ``source``: the rank
    that has it; ``target``: the rank that is to have it.

    Example, two ranks that have sampled two rows each, and exchange one each:
    ``Route(lengths=[5, 7, 2, 3], source=[0, 0, 1, 1], target=[0, 1, 0, 1])``.
    """

    lengths: Int[np.ndarray, " rows"]
    source: Ranks
    target: Ranks

    def outgoing(self, rank: int) -> Int[np.ndarray, " sent"]:
        """Rows that ``rank`` sends, by target, of one target in canonical order."""
        rows = np.flatnonzero(self.source == rank)
        return rows[np.argsort(self.target[rows], kind="stable")]

    def incoming(self, rank: int) -> Int[np.ndarray, " received"]:
        """Rows that ``rank`` receives, by source, of one source in canonical order."""
        rows = np.flatnonzero(self.target == rank)
        return rows[np.argsort(self.source[rows], kind="stable")]

    def tokens_to(self, rank: int, num_ranks: int) -> list[int]:
        """Tokens that ``rank`` sends to each rank."""
        return self._tokens(self.source == rank, self.target, num_ranks)

    def tokens_from(self, rank: int, num_ranks: int) -> list[int]:
        """Tokens that ``rank`` receives from each rank."""
        return self._tokens(self.target == rank, self.source, num_ranks)

    def _tokens(self, rows: np.ndarray, peer: Ranks, num_ranks: int) -> list[int]:
        tokens = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(tokens, peer[rows], self.lengths[rows])
        return tokens.tolist()


def owning_ranks(
    plans: Sequence[Sequence[Sequence[Sequence[int]]]], num_rows: int, owners: Sequence[int]
) -> Ranks:
    """The rank that trains each row. ``plans``: micro-batches by data-parallel rank, one plan for
    each minibatch of a pass, which name every row at most once; ``owners``: the rank that takes the
    rows of a data-parallel rank. A row that no plan names goes to its place modulo the owners.

    Example, one plan for two data-parallel ranks whose first processes are ranks 0 and 4:
    ``owning_ranks([[[[0, 2]], [[1]]]], 3, [0, 4]) == [0, 4, 0]``.
    """
    result = np.asarray(owners, dtype=np.int64)[np.arange(num_rows) % len(owners)]
    for plan in plans:
        for owner, microbatches in zip(owners, plan, strict=True):
            for rows in microbatches:
                result[rows] = owner
    return result
