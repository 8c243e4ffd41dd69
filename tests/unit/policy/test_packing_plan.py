"""Micro-batch plans: a partition, within the budget, balanced, the same everywhere."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.policy.batches.packing_plan import (
    PlanRule,
    largest_differencing,
    plan_microbatches,
    rough_plan,
)
from megatron_rl.policy.batches.work_model import WorkModel
from tests.unit.data import plain_packing
from tests.unit.data.plain_packing import BY_TOKENS

BUDGET = 64


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, BUDGET), max_size=40),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
    seed=st.integers(0, 10),
)
def test_a_plan_is_a_partition_of_the_rows_within_the_budget(lengths, ranks, multiple, seed):
    rows = random.Random(seed).sample(range(len(lengths)), k=len(lengths) * 3 // 4)
    plan = plan_microbatches(lengths, rows, PlanRule(ranks, BUDGET, multiple, BY_TOKENS))
    bins = [part for rank in plan for part in rank]
    assert (
        len(plan) == ranks
        and len({len(rank) for rank in plan}) == 1
        and len(plan[0]) % multiple == 0
        and len(plan[0]) > 0
    )
    assert sorted(row for part in bins for row in part) == sorted(rows)
    assert all(sum(lengths[row] for row in part) <= BUDGET for part in bins)
    assert sum(not part for part in bins) == max(0, len(bins) - len(rows)), (
        "an empty micro-batch although rows were left"
    )
    shuffled = random.Random(seed + 1).sample(rows, k=len(rows))
    assert plan == plan_microbatches(
        lengths, shuffled, PlanRule(ranks, BUDGET, multiple, BY_TOKENS)
    )


def test_differencing_by_hand():
    # 8 7 6 5 4 in two bins: 8-7=1 and 6-5=1 leave 4 1 1; 4-1=3, 3-1=2, hence sums 16 and 14 (greedy
    # would give 17 and 13).
    bins = largest_differencing([(8, 0), (7, 1), (6, 2), (5, 3), (4, 4)], 2)
    assert bins == [(16, [1, 3, 4]), (14, [0, 2])]
    # Three bins, five equal items: 2, 2 and 1 of them.
    assert [length for length, _ in largest_differencing([(3, row) for row in range(5)], 3)] == [
        6,
        6,
        3,
    ]


def test_where_balance_overruns_the_budget_a_tight_packing_is_used():
    # 10 = 6 + 4 = 5 + 5: only this pairing fits two micro-batches of 10, and one more would be
    # waste.
    plan = plan_microbatches([5, 6, 5, 4], range(4), PlanRule(1, 10, 1, BY_TOKENS))
    assert sorted(plan[0]) == [[0, 2], [1, 3]]


def test_bins_left_over_by_a_tight_packing_are_filled():
    # 7+3, 6+4, 5+5 fills three bins exactly, balance alone overruns at 4 bins nowhere: every one of
    # 4 bins gets rows.
    lengths = [7, 3, 6, 4, 5, 5]
    plan = plan_microbatches(lengths, range(6), PlanRule(2, 10, 2, BY_TOKENS))
    assert all(part for rank in plan for part in rank)


def test_log_normal_lengths_fill_and_balance():
    """Real tokens over the tokens every rank waits for: the largest rank sum, and the largest
    micro-batch."""
    rng = random.Random(0)
    lengths = [min(8192, max(8, int(rng.lognormvariate(6, 1)))) for _ in range(1024)]
    plan = plan_microbatches(lengths, range(1024), PlanRule(4, 16384, 1, BY_TOKENS))
    per_rank = [[sum(lengths[row] for row in part) for part in rank] for rank in plan]
    total, num_bins = sum(lengths), 4 * len(plan[0])
    assert total / (4 * max(map(sum, per_rank))) > 0.99
    assert total / (num_bins * max(map(max, per_rank))) > 0.95
    assert num_bins - 4 < -(-total // 16384), "more micro-batches than the tokens need"
    assert all(rank == sorted(rank, reverse=True) for rank in per_rank), (
        "the largest micro-batch comes first"
    )


def test_a_row_over_the_budget_is_named():
    with pytest.raises(
        ValueError, match=r"tokens_per_microbatch = 10: sequence 2 alone has 11 tokens; raise it"
    ):
        plan_microbatches([3, 10, 11], [0, 1, 2], PlanRule(1, 10, 1, BY_TOKENS))
    assert plan_microbatches([3, 10, 11], [0, 1], PlanRule(1, 10, 1, BY_TOKENS)) == [[[1], [0]]]


ROW = st.tuples(st.integers(1, 30), st.integers(1, BUDGET))  # cost, tokens of the budget


@settings(max_examples=200)
@given(
    table=st.lists(ROW, max_size=40),
    ranks=st.integers(1, 6),
    multiple=st.integers(1, 3),
    budget=st.integers(BUDGET, 2 * BUDGET),
    dropped=st.integers(0, 2),
)
def test_a_plan_is_that_of_the_plain_way(table, ranks, multiple, budget, dropped):
    """Costs from a small range: many are equal, so that every rule for ties is met."""
    costs = [cost for cost, _ in table]
    tokens = [token for _, token in table]
    rows = list(range(len(table)))[:: dropped + 1]
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=multiple)
    expected = plain_packing.plan(costs, rows, budgeted=tokens, **sizes)
    assert rough_plan(costs, rows, tokens, PlanRule(**sizes, work=BY_TOKENS)) == expected


def work_of_ranks(plan, work) -> list[int]:
    return [sum(int(work[row]) for rows in rank for row in rows) for rank in plan]


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, BUDGET), max_size=40),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    crossover=st.integers(1, 200),
)
def test_ranks_leveled_by_work_keep_what_a_plan_promises(lengths, ranks, multiple, crossover):
    model = WorkModel(crossover)
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=BUDGET, multiple=multiple)
    plan = plan_microbatches(lengths, range(len(lengths)), PlanRule(work=model, **sizes))
    microbatches = [rows for rank in plan for rows in rank]
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple == 0
    assert sorted(row for rows in microbatches for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= BUDGET for rows in microbatches)
    assert sum(not rows for rows in microbatches) == max(0, len(microbatches) - len(lengths))
    tokens = [[sum(lengths[row] for row in rows) for rows in rank] for rank in plan]
    assert all(rank == sorted(rank, reverse=True) for rank in tokens)
    work = model.work(np.array(lengths, dtype=np.int64)).tolist()
    rough = rough_plan(work, range(len(lengths)), lengths, PlanRule(**sizes, work=model))
    assert max(work_of_ranks(plan, work)) <= max(work_of_ranks(rough, work))


def test_balance_by_work_by_hand():
    # By tokens, 6 + 1 and 4 + 3 are even. With a crossover of 1 token the rows have work 42, 20, 12
    # and 2: 42 against 34 is the best.
    lengths = [6, 4, 3, 1]
    sizes = dict(data_parallel_size=2, tokens_per_microbatch=8, multiple=1)
    assert plan_microbatches(lengths, range(4), PlanRule(**sizes, work=BY_TOKENS)) == [
        [[1, 2]],
        [[0, 3]],
    ]
    assert plan_microbatches(lengths, range(4), PlanRule(work=WorkModel(1), **sizes)) == [
        [[0]],
        [[1, 2, 3]],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_long_responses_on_64_ranks_are_even_in_work(seed):
    """Up to 32k tokens, 16 rows a rank, a model of 7B."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(4096), 1.0, 1024), 64, 32768).astype(int)
    model = WorkModel(70_452)
    work = model.work(lengths)

    def imbalance(balanced: WorkModel) -> float:
        plan = plan_microbatches(lengths.tolist(), range(1024), PlanRule(64, 32768, 1, balanced))
        of_ranks = work_of_ranks(plan, work)
        return max(of_ranks) * 64 / sum(of_ranks)

    assert imbalance(BY_TOKENS) > 1.05
    assert imbalance(model) < 1.02


def test_a_plan_for_1024_ranks_does_not_take_quadratic_time():
    """About 0.2 s of one core; lists sorted anew at every step take more than 20 s."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(8.0, 0.8, 16384), 16, 16384).astype(int).tolist()
    begin = time.process_time()
    plan = plan_microbatches(lengths, range(16384), PlanRule(1024, 16384, 1, WorkModel(70_452)))
    assert time.process_time() - begin < 10
    assert sum(len(rows) for rank in plan for rows in rank) == 16384
