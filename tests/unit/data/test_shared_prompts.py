"""Micro-batches of parts of prompts' responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.packing import plan_microbatches
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.shared_prompts import plan_shared_prompts
from megatron_rl.types import SequenceBatch


def batch(groups: list[tuple[int, list[int]]]) -> SequenceBatch:
    """(prompt tokens, response tokens of each response) of every prompt."""
    pairs = [((7,) * prompt, (8,) * response) for prompt, responses in groups for response in responses]
    ids = torch.tensor([number for number, (_, responses) in enumerate(groups) for _ in responses])
    return sequence_batch(pairs, ids)


def computed(sequences: SequenceBatch, microbatch: list[int]) -> int:
    """Tokens of a forward pass, prompts of neighbours once: the plain count."""
    total, before = 0, None
    for row in microbatch:
        prompt = int(sequences.prompt_ids[row])
        total += int(sequences.response_lengths[row]) + (int(sequences.prompt_lengths[row]) if prompt != before else 0)
        before = prompt
    return total


def test_whole_groups_where_they_balance():
    sequences = batch([(10, [1, 1, 1, 1]), (10, [1, 1, 1, 1])])
    plan = plan_shared_prompts(sequences, range(8), data_parallel_size=2, tokens_per_microbatch=100, multiple=1)
    assert sorted(sorted(rank[0]) for rank in plan) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_group_is_cut_where_a_rank_would_wait_and_where_the_budget_ends():
    sequences = batch([(10, [50, 50, 50, 50])])
    halves = plan_shared_prompts(sequences, range(4), data_parallel_size=2, tokens_per_microbatch=1000, multiple=1)
    assert halves == [[[0, 1]], [[2, 3]]]
    small = plan_shared_prompts(sequences, range(4), data_parallel_size=1, tokens_per_microbatch=120, multiple=1)
    assert small == [[[0, 1], [2, 3]]]
    assert len(plan_shared_prompts(sequences, range(4), data_parallel_size=1, tokens_per_microbatch=119, multiple=1)[0]) == 4


def test_a_response_that_exceeds_the_budget_is_an_error():
    with pytest.raises(ValueError, match="tokens_per_microbatch = 20: sequence 2 alone has 21"):
        plan_shared_prompts(batch([(10, [1, 1]), (10, [11])]), [0, 1, 2], data_parallel_size=1, tokens_per_microbatch=20, multiple=1)


@given(
    groups=st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9)), min_size=1, max_size=8),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 2),
    budget=st.integers(80, 300),
    dropped=st.integers(0, 3),
)
def test_a_partition_within_the_budget_that_no_rank_computes_longer(groups, ranks, multiple, budget, dropped):
    sequences = batch(groups)
    rows = list(range(sequences.num_responses))[:: dropped + 1]
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=multiple)
    plan = plan_shared_prompts(sequences, rows, **sizes)
    assert sorted(row for rank in plan for microbatch in rank for row in microbatch) == rows
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    lengths = sequences.lengths.tolist()
    assert all(sum(lengths[row] for row in microbatch) <= budget for rank in plan for microbatch in rank), "attention has them whole"
    plain = max(sum(lengths[row] for part in rank for row in part) for rank in plan_microbatches(lengths, rows, **sizes))
    assert max(sum(computed(sequences, microbatch) for microbatch in rank) for rank in plan) <= plain
