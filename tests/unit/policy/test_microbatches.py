"""Micro-batches as one rank sees them."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.policy.batches.batching import Batching
from megatron_rl.policy.batches.microbatches import (
    Microbatch,
    Multiples,
    Packer,
    multiples,
    padded_lengths,
)
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.passes.attention import group, zigzag
from megatron_rl.types import SequenceBatch
from tests.unit.data.plain_packing import BY_TOKENS

CPU = torch.device("cpu")
# Sequences "5 6 | 7" (row 0), "8 | 9 10 11" (row 1) and "12 | 13" (row 2); response tokens 7 | 9 10
# 11 | 13.
BATCH = SequenceBatch(
    torch.tensor([2, 1, 1]), torch.tensor([1, 3, 1]), token_ids=torch.arange(5, 14)
)
NO_RULE = Multiples(1, 1)


def seen(microbatch: Microbatch) -> list[tuple[int, int, int]]:
    """(token whose state predicts, predicted token, place in the response-token layout)."""
    states = microbatch.token_ids[0][microbatch.rows].tolist()
    return list(zip(states, microbatch.targets.tolist(), microbatch.index.tolist(), strict=True))


def test_prompt_ends_and_all_but_the_last_response_token_predict() -> None:
    packed = Packer(NO_RULE, 0, 1, CPU).pack(BATCH, [1, 0])
    assert packed.token_ids.tolist() == [[8, 9, 10, 11, 5, 6, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.packing.cu_seqlens_q.tolist() == [0, 4, 7]
    assert seen(packed) == [(8, 9, 1), (9, 10, 2), (10, 11, 3), (6, 7, 0)]
    assert not packed.empty


def test_an_empty_microbatch_holds_a_dummy_and_predicts_nothing() -> None:
    packed = Packer(Multiples(4, 8), 0, 1, CPU).pack(BATCH, [])
    assert packed.empty
    assert packed.token_ids.shape == (1, 8)
    assert seen(packed) == []


@pytest.mark.parametrize(
    ("context", "tensor", "sequence", "expected"),
    [
        (1, 1, False, (1, 1)),
        (1, 2, True, (1, 2)),
        (2, 1, False, (4, 4)),
        (2, 2, True, (4, 4)),
        (2, 4, True, (4, 8)),
        (3, 4, True, (6, 12)),
    ],
)
def test_multiples(context: int, tensor: int, sequence: bool, expected: tuple[int, int]) -> None:
    assert multiples(context, tensor, sequence) == Multiples(*expected)


def test_padding_of_each_sequence_and_of_the_total() -> None:
    assert padded_lengths(BATCH, [0, 1, 2], Multiples(1, 4)).tolist() == [3, 4, 5]
    assert padded_lengths(BATCH, [0, 1, 2], Multiples(4, 8)).tolist() == [4, 4, 8]
    assert padded_lengths(BATCH, [0, 1], Multiples(1, 1), at_least=20).tolist() == [3, 17]


def test_context_ranks_share_a_sequence_in_two_chunks_each() -> None:
    assert zigzag(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 1, 2).tolist() == [2, 3, 4, 5]
    ranks = [Packer(Multiples(4, 4), rank, 2, CPU).pack(BATCH, [1, 0]) for rank in (0, 1)]
    assert ranks[0].token_ids.tolist() == [[8, 11, 5, 0]]
    assert ranks[1].token_ids.tolist() == [[9, 10, 6, 7]]
    assert ranks[0].position_ids.tolist() == [[0, 3, 0, 3]]
    assert seen(ranks[0]) == [(8, 9, 1)]
    assert seen(ranks[1]) == [(9, 10, 2), (10, 11, 3), (6, 7, 0)]
    assert ranks[0].packing.cu_seqlens_q.tolist() == [0, 4, 8], "boundaries are those of all ranks"


def test_padding_never_predicts() -> None:
    packed = Packer(Multiples(8, 8), 0, 1, CPU).pack(BATCH, [0, 2])
    assert seen(packed) == [(6, 7, 0), (12, 13, 4)]


# Responses "7", "8 9" and "10" to the prompt "5 6", and "11" to the prompt "5".
SHARED = SequenceBatch(
    torch.tensor([2, 2, 2, 1]),
    torch.tensor([1, 2, 1, 1]),
    torch.tensor([0, 0, 0, 1]),
    token_ids=torch.tensor([5, 6, 7, 5, 6, 8, 9, 5, 6, 10, 5, 11]),
)


def test_neighbours_with_the_same_prompt_pack_it_once_and_its_end_predicts_every_first_token() -> (
    None
):
    packed = Packer(NO_RULE, 0, 1, CPU, share=True).pack(SHARED, [0, 1, 2, 3])
    assert packed.token_ids.tolist() == [[5, 6, 7, 8, 9, 10, 5, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 2, 0, 1]]
    assert packed.packing.positions.tolist() == packed.position_ids[0].tolist()
    assert packed.packing.cu_seqlens_q.tolist() == [0, 8], "one run of rotary angles"
    assert seen(packed) == [(6, 7, 0), (6, 8, 1), (8, 9, 2), (6, 10, 3), (5, 11, 4)]


def test_only_neighbours_share_and_only_when_told() -> None:
    apart = Packer(NO_RULE, 0, 1, CPU, share=True).pack(SHARED, [0, 3, 2])
    assert apart.token_ids.tolist() == [[5, 6, 7, 5, 11, 5, 6, 10]]
    assert (
        apart.packing.cu_seqlens_q.tolist() == [0, 3, 5, 8] and apart.packing.positions is None
    ), "nothing shared: as ever"
    plain = Packer(NO_RULE, 0, 1, CPU).pack(SHARED, [0, 1])
    assert plain.token_ids.tolist() == [[5, 6, 7, 5, 6, 8, 9]]
    assert plain.packing.positions is None


def test_attention_sees_a_shared_prompt_before_every_response_and_restores_it_from_its_owner() -> (
    None
):
    packing = Packer(Multiples(1, 4), 0, 1, CPU, share=True).pack(SHARED, [0, 1, 2]).packing
    (part, short), restore = packing.groups
    # Places 0 and 1 hold the prompt, 2 "7", 3 and 4 "8 9", 5 "10", and 6 and 7 stretch the last
    # sequence to a multiple of 4.
    assert part.tokens.view(part.count, part.length).tolist() == [
        [0, 1, 5, 6, 7],
        [0, 1, 2, 2, 2],
    ]
    assert short.queries is not None
    assert (short.tokens.tolist(), short.queries.tolist()) == ([0, 1, 3, 4], [3, 4])
    assert restore.tolist() == [5, 6, 7, 10, 11, 2, 3, 4]


def test_a_row_without_prompt_is_named() -> None:
    batch = SequenceBatch(torch.tensor([1, 0]), torch.tensor([1, 1]), token_ids=torch.arange(3))
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        Packer(NO_RULE, 0, 1, CPU).pack(batch, [0, 1])


def test_groups_restore_the_packed_order() -> None:
    lengths = torch.tensor([70, 3, 200, 5, 90, 64])
    groups, restore = group(lengths, torch.zeros(6, dtype=torch.long), torch.arange(6), CPU)
    assert [(part.count, part.length) for part in groups] == [
        (1, 200),
        (3, 90),
        (2, 5),
    ], "a group ends below half its longest"
    tokens = torch.cat([part.tokens for part in groups])
    assert torch.equal(tokens[restore], torch.arange(int(lengths.sum())))
    padding = torch.ones(len(tokens), dtype=torch.bool)
    padding[restore] = False
    assert padding.sum() == sum(part.count * part.length for part in groups) - lengths.sum()
    assert tokens[:200].tolist() == list(range(73, 273))


@pytest.mark.parametrize(
    "layout",
    [(1, 1, False, 1), (4, 1, False, 1), (1, 8, True, 1), (1, 4, True, 16), (1, 4, True, 128)],
)
def test_of_log_normal_lengths_at_least_95_of_100_computed_tokens_are_real(layout) -> None:
    """Context ranks, tensor ranks, sequence parallelism, and what the number format asks: none, FP8
    per tensor, FP8 in blocks."""
    draw = random.Random(0)
    lengths = [min(4096, max(8, int(draw.lognormvariate(6, 1)))) for _ in range(512)]
    plan = plan_microbatches(lengths, range(512), PlanRule(4, 8192, 1, BY_TOKENS))
    ones = torch.ones(512, dtype=torch.long)
    batch = SequenceBatch(
        ones, torch.tensor(lengths) - ones, token_ids=torch.zeros(sum(lengths), dtype=torch.long)
    )
    computed = sum(
        int(padded_lengths(batch, rows, multiples(*layout)).sum()) for rank in plan for rows in rank
    )
    assert sum(lengths) < computed or layout == (1, 1, False, 1)
    assert sum(lengths) / computed >= 0.95


def test_temperatures_go_with_their_tokens() -> None:
    """Rows in another order; prompt tokens have 1, and so would all have without temperatures."""
    batch = replace(BATCH, temperatures=torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9]))
    packed = Packer(NO_RULE, 0, 1, CPU).pack(batch, [1, 0])
    assert packed.index.tolist() == [1, 2, 3, 0]
    assert packed.temperatures is not None
    assert packed.temperatures.tolist() == pytest.approx([0.6, 0.7, 0.8, 0.5])
    packed = Packer(NO_RULE, 0, 1, CPU).pack(batch, [0], prompts=True)
    assert packed.targets.tolist() == [6, 7] and packed.index[1] == 0
    assert packed.temperatures is not None
    assert packed.temperatures.tolist() == pytest.approx([1, 0.5])
    halves = [Packer(Multiples(4, 4), rank, 2, CPU).pack(batch, [1]) for rank in range(2)]
    for half in halves:
        assert half.temperatures is not None
        assert half.temperatures.tolist() == batch.temperatures[half.index].tolist()
    assert sorted(torch.cat([half.index for half in halves]).tolist()) == [1, 2, 3]
    assert Packer(NO_RULE, 0, 1, CPU).pack(BATCH, [1, 0]).temperatures is None
    empty = Packer(NO_RULE, 0, 1, CPU).pack(batch, []).temperatures
    assert empty is not None and len(empty) == 0


def test_a_micro_batch_is_packed_when_it_is_taken_and_once(monkeypatch) -> None:
    """A device works on the first while the next is packed."""
    packed = []
    pack = Packer.pack
    monkeypatch.setattr(
        Packer, "pack", lambda *args, **more: packed.append(args[2]) or pack(*args, **more)
    )
    batching = Batching(
        config=SimpleNamespace(num_moe_experts=None),
        ranks=SimpleNamespace(pipeline=1),
        rule=PlanRule(1, 64, 1, BY_TOKENS),
        packer=Packer(NO_RULE, 0, 1, CPU),
    )
    found = batching.packed(BATCH, [[2], [0, 1]])
    assert not packed and len(found) == 2
    first = next(iter(found))
    assert packed == [[2]] and found[0] is first
    assert [each.token_ids.numel() for each in found] == [2, 7] and packed == [[2], [0, 1]]
