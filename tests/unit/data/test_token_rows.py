"""Flat token data of some rows."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.token_rows import TokenRows

ROWS = TokenRows(
    rows=np.array([7, 2, 5]),
    lengths=np.array([2, 0, 3]),
    columns={
        "token_ids": np.array([1, 2, 3, 4, 5], dtype=np.int32),
        "sampler_logprobs": np.array([-1, -2, -3, -4, -5], dtype=np.float32),
    },
)


def test_rows_are_taken_by_their_numbers_in_the_order_asked_for():
    taken = ROWS.take([5, 7])
    assert taken.rows.tolist() == [5, 7]
    assert taken.lengths.tolist() == [3, 2]
    assert taken.columns["token_ids"].tolist() == [3, 4, 5, 1, 2]
    assert taken.columns["sampler_logprobs"].tolist() == [-3, -4, -5, -1, -2]
    assert taken.columns["token_ids"].dtype == np.int32


def test_nothing_taken_keeps_the_columns():
    taken = ROWS.take([])
    assert list(taken.columns) == ["token_ids", "sampler_logprobs"]
    assert taken.columns["sampler_logprobs"].dtype == np.float32
    assert [len(values) for values in taken.columns.values()] == [0, 0]


def test_a_row_that_is_not_here_is_an_error():
    with pytest.raises(KeyError):
        ROWS.take([3])


def test_views_are_the_rows_and_share_memory():
    views = ROWS.views("token_ids")
    assert [view.tolist() for view in views] == [[1, 2], [], [3, 4, 5]]
    assert all(np.shares_memory(view, ROWS.columns["token_ids"]) for view in views if len(view))
    assert ROWS.offsets.tolist() == [0, 2, 2, 5]


def test_a_column_of_another_length_is_refused():
    with pytest.raises(AssertionError):
        TokenRows(np.array([0]), np.array([2]), {"token_ids": np.array([1])})


def test_a_batch_is_made_of_views_as_of_lists():
    ids = ROWS.take([7, 5]).views("token_ids")
    batch = sequence_batch([((8, 9), ids[0]), ((6,), ids[1])])
    assert batch.token_ids.tolist() == [8, 9, 1, 2, 6, 3, 4, 5]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_lengths.tolist() == [2, 3]
