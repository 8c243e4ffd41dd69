"""Micro-batches of parts of prompts' responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.batches.work_model import WorkModel
from megatron_rl.policy.passes.prefix_sharing import plan_shared_prompts
from megatron_rl.types import SequenceBatch
from tests.unit.data.plain_packing import BY_TOKENS


def batch(groups: list[tuple[int, list[int]]]) -> SequenceBatch:
    """(prompt tokens, response tokens of each response) of every prompt."""
    pairs = [
        ((7,) * prompt, (8,) * response) for prompt, responses in groups for response in responses
    ]
    ids = torch.tensor([number for number, (_, responses) in enumerate(groups) for _ in responses])
    return sequence_batch(pairs, ids)


def computed(sequences: SequenceBatch, microbatch: list[int]) -> int:
    """Tokens of a forward pass, prompts of neighbours once: the plain count."""
    total, before = 0, None
    for row in microbatch:
        prompt = int(sequences.prompt_index[row])
        total += int(sequences.response_lengths[row]) + (
            int(sequences.prompt_lengths[row]) if prompt != before else 0
        )
        before = prompt
    return total


def test_whole_groups_where_they_balance():
    sequences = batch([(10, [1, 1, 1, 1]), (10, [1, 1, 1, 1])])
    plan = plan_shared_prompts(sequences, range(8), PlanRule(2, 100, 1, BY_TOKENS))
    assert sorted(sorted(rank[0]) for rank in plan) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_group_is_cut_where_a_rank_would_wait_and_where_the_budget_ends():
    sequences = batch([(10, [50, 50, 50, 50])])
    halves = plan_shared_prompts(sequences, range(4), PlanRule(2, 1000, 1, BY_TOKENS))
    assert halves == [[[0, 1]], [[2, 3]]]
    small = plan_shared_prompts(sequences, range(4), PlanRule(1, 120, 1, BY_TOKENS))
    assert small == [[[0, 1], [2, 3]]]
    assert len(plan_shared_prompts(sequences, range(4), PlanRule(1, 119, 1, BY_TOKENS))[0]) == 4


def test_a_response_that_exceeds_the_budget_is_an_error():
    with pytest.raises(ValueError, match="tokens_per_microbatch = 20: sequence 2 alone has 21"):
        plan_shared_prompts(
            batch([(10, [1, 1]), (10, [11])]), [0, 1, 2], PlanRule(1, 20, 1, BY_TOKENS)
        )


GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9)),
    min_size=1,
    max_size=8,
)


@given(
    groups=GROUPS,
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 2),
    budget=st.integers(80, 300),
    dropped=st.integers(0, 3),
)
def test_a_partition_within_the_budget_that_no_rank_computes_longer(
    groups, ranks, multiple, budget, dropped
):
    sequences = batch(groups)
    rows = list(range(sequences.num_responses))[:: dropped + 1]
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=multiple)
    plan = plan_shared_prompts(sequences, rows, PlanRule(**sizes, work=BY_TOKENS))
    assert sorted(row for rank in plan for microbatch in rank for row in microbatch) == rows
    assert (
        len(plan) == ranks
        and len({len(rank) for rank in plan}) == 1
        and len(plan[0]) % multiple == 0
    )
    lengths = sequences.lengths.tolist()
    assert all(
        sum(lengths[row] for row in microbatch) <= budget for rank in plan for microbatch in rank
    ), "attention has them whole"
    plain = max(
        sum(lengths[row] for part in rank for row in part)
        for rank in plan_microbatches(lengths, rows, PlanRule(**sizes, work=BY_TOKENS))
    )
    assert (
        max(sum(computed(sequences, microbatch) for microbatch in rank) for rank in plan) <= plain
    )


def work_of(sequences: SequenceBatch, microbatch: list[int], model: WorkModel) -> int:
    """Pairs of attention counted one by one, prompts of neighbors once."""
    tokens = pairs = 0
    before = None
    for row in microbatch:
        prompt = int(sequences.prompt_index[row])
        whole = int(sequences.lengths[row])
        first = int(sequences.prompt_lengths[row]) if prompt == before else 0
        tokens += whole - first
        # Token number i of a sequence attends to i pairs, halved and doubled: 2 i - 1.
        pairs += sum(2 * place - 1 for place in range(first + 1, whole + 1))
        before = prompt
    return tokens + pairs // model.crossover_tokens


def test_balance_by_work_has_the_attention_to_shared_prompts():
    # Tokens: 60 + 4 x 10 against 100. Work with a crossover of 1 token: 3600 for the prompt and
    # 70^2 - 60^2 = 1300 for each response against 10000, so that no response leaves its prompt.
    sequences = batch([(60, [10, 10, 10, 10]), (50, [50])])
    model = WorkModel(1)
    plan = plan_shared_prompts(sequences, range(5), PlanRule(2, 300, 1, model))
    assert sorted(rank[0] for rank in plan) == [[0, 1, 2, 3], [4]]
    assert work_of(sequences, [0, 1, 2, 3], model) == 60 + 40 + 3600 + 4 * 1300
    assert work_of(sequences, [4], model) == 100 + 10000


@settings(max_examples=50)
@given(
    groups=GROUPS,
    ranks=st.integers(1, 4),
    budget=st.integers(80, 300),
)
def test_a_plan_by_work_is_no_slower_than_whole_sequences(groups, ranks, budget):
    sequences = batch(groups)
    model = WorkModel(1)  # whole numbers: nothing is rounded
    sizes = dict(data_parallel_size=ranks, tokens_per_microbatch=budget, multiple=1)
    rows = range(sequences.num_responses)
    plan = plan_shared_prompts(sequences, rows, PlanRule(work=model, **sizes))
    assert sorted(row for rank in plan for microbatch in rank for row in microbatch) == list(rows)
    lengths = sequences.lengths.tolist()
    assert all(sum(lengths[row] for row in rows) <= budget for rank in plan for rows in rank)
    slowest = max(sum(work_of(sequences, rows, model) for rows in rank) for rank in plan)
    plain = plan_microbatches(lengths, rows, PlanRule(work=model, **sizes))
    whole = max(
        sum(work_of(sequences, [row], model) for rows in rank for row in rows) for rank in plain
    )
    assert slowest <= whole
