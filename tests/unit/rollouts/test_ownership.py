"""Who has which row before and after the exchange."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollouts.rows.exchange import Route, owning_ranks


def test_the_examples():
    route = Route(
        lengths=np.array([5, 7, 2, 3]),
        source=np.array([0, 0, 1, 1]),
        target=np.array([0, 1, 0, 1]),
    )
    assert route.outgoing(0).tolist() == [0, 1]
    assert route.incoming(0).tolist() == [0, 2]
    assert route.tokens_to(0, 2) == [5, 7]
    assert route.tokens_from(0, 2) == [5, 2]
    assert route.tokens_from(1, 3) == [7, 3, 0]
    assert owning_ranks([[[0, 2]], [[1]]], 3, [0, 4]).tolist() == [0, 4, 0]


def test_a_plan_names_its_rows_and_dropped_rows_have_an_owner():
    plan = [[[0], [3], [4]], [[1], [], [6]]]
    assert owning_ranks(plan, 8, [2, 5]).tolist() == [2, 5, 2, 2, 2, 5, 5, 5]


@given(
    table=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=30)
)
def test_what_one_sends_another_receives(table):
    columns = np.array(table, dtype=np.int64).reshape(-1, 3)
    route = Route(*columns.T)
    ranks = range(5)
    for rank in ranks:
        sent = route.outgoing(rank).tolist()
        expected = sorted(
            (row for row in range(len(table)) if table[row][1] == rank),
            key=lambda row: (table[row][2], row),
        )
        assert sent == expected
        received = [
            row for other in ranks for row in route.outgoing(other) if table[row][2] == rank
        ]
        assert route.incoming(rank).tolist() == received
        assert route.tokens_from(rank, 5) == [route.tokens_to(other, 5)[rank] for other in ranks]
