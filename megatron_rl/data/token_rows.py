"""Token data of some responses, as flat arrays: what a rank holds, sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

RowNumbers = Sequence[int] | Int[np.ndarray, " _"]
Ranks = Int[np.ndarray, " rows"]


@dataclass(frozen=True)
class TokenRows:
    """Some rows of a step, the response tokens of all end to end.

    ``rows`` are row numbers in the canonical order of the step, ``lengths`` their response tokens,
    and ``columns`` arrays of one value, or row, for each token: token ids, logprobs of any origin,
    entropies, the tokens that the sampler kept. Example, row 4 with two tokens and row 1 with one:
    ``TokenRows(rows=[4, 1], lengths=[2, 1], columns={"token_ids": [9, 2, 5], "sampler_logprobs":
    [-0.1, -0.7, -0.2]})``.
    """

    rows: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]
    columns: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        tokens = int(self.lengths.sum())
        assert len(self.rows) == len(self.lengths)
        assert all(len(values) == tokens for values in self.columns.values())

    @property
    def offsets(self) -> Int[np.ndarray, " rows_plus_1"]:
        """Row i has places ``[offsets[i], offsets[i + 1])`` of every column."""
        return np.concatenate([[0], self.lengths.cumsum()])

    def views(self, column: str) -> list[np.ndarray]:
        """The values of each row, without a copy."""
        values = self.columns[column]
        # Lengths 2 and 1: ends 2 and 3, rows [0, 2) and [2, 3).
        ends = self.lengths.cumsum().tolist()
        return [values[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]

    def take(self, rows: RowNumbers) -> TokenRows:
        """The rows of these numbers, in this order; all must be here."""
        places = self.places(rows)
        columns = {}
        for name, values in self.columns.items():
            views = self.views(name)
            # The empty slice gives the dtype where no row is taken.
            columns[name] = np.concatenate([values[:0], *(views[place] for place in places)])
        return TokenRows(self.rows[places], self.lengths[places], columns)

    def places(self, rows: RowNumbers) -> list[int]:
        """Where the rows of these numbers stand among ``self.rows``. Example: rows 7, 2 and 5 are
        held, then ``places([5, 7]) == [2, 0]``."""
        place_of = {row: place for place, row in enumerate(self.rows.tolist())}
        return [place_of[row] for row in np.asarray(rows).tolist()]
