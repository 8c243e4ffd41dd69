"""Plans over random layouts and random nodes: each byte once into each node and once to each
process, counted element by element."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.weight_sync.planner.plan import Plan, PlanSettings, make_plan
from megatron_rl.weight_sync.planner.program import compile_program
from megatron_rl.weight_sync.planner.slices import Slice, common_parts, covered, split
from tests.unit.weight_sync.slow_layouts import (
    UNWRITTEN,
    hf_tensors,
    megatron_shards,
    simulate,
    vllm_shards,
)
from tests.unit.weight_sync.training_tables import TrainLayout, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.plan_figures import num_peers, streams

MODEL = ModelShape(
    layers=4, hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=8, vocab=66, dtype="float32"
)
MOE = replace(MODEL, experts=4, moe_ffn=4, qk_norm=True)
T, R = TrainLayout, RolloutLayout
CASES = [  # model, training, rollout, ranks of a node
    (MODEL, T(tp=2, pp=2, dp=2), R(tp=1, dp=8), 4),
    (MODEL, T(tp=2, pp=2, dp=2), R(tp=2, dp=4), 4),
    (MODEL, T(tp=4, pp=2, dp=2), R(tp=4, dp=4), 8),
    (MODEL, T(tp=2), R(tp=1, dp=6, first_rank=2), 2),
    (MODEL, T(tp=2, dp=2), R(tp=2, dp=6, first_rank=4), 4),
    (MODEL, T(tp=1, dp=4), R(tp=2, dp=1, first_rank=4), 2),
    (MODEL, T(tp=2, pp=2), R(tp=4, dp=5, first_rank=4), 2),
    (MODEL, T(tp=1), R(tp=1, dp=7, first_rank=1), 1),
    (MODEL, T(dp=3), R(tp=1, dp=4), 2),
    (MOE, T(tp=2, ep=4, dp=2), R(tp=2, dp=4, first_rank=4), 4),
    (MOE, T(tp=2, ep=2, dp=4, pp=2), R(tp=2, dp=8), 8),
    (MOE, T(ep=2, dp=2), R(tp=1, dp=4, ep=4, first_rank=2), 2),
]


def planned(
    model: ModelShape, train: TrainLayout, rollout: RolloutLayout, gpus_per_node: int
) -> tuple[Plan, dict, dict]:
    sources = {rank: train_shards(model, train, rank) for rank in range(train.ranks)}
    targets = {rank: rollout_shards(model, rollout, rank) for rank in rollout.ranks}
    settings = PlanSettings(208, gpus_per_node=gpus_per_node, replicas=rollout.replicas)
    return make_plan(sources, targets, settings), sources, targets


def is_the_least(plan: Plan, sources: dict, targets: dict, gpus_per_node: int) -> None:
    """Into each process what it lacks, into each node what is on none of its ranks."""
    into: Counter = Counter()
    for stream, size in streams(plan.flows).items():
        into[stream.target] += size
    each = entering(sources, targets, 1)
    assert into == +Counter(each)
    assert plan.bytes_sent == plan.lower_bound == sum(each.values())
    across = sum(entering(sources, targets, gpus_per_node).values())
    assert plan.bytes_by_link["across_nodes"] == plan.node_bound == across


def entering(sources: dict, targets: dict, gpus_per_node: int) -> dict[int, int]:
    """Bytes wanted on each node and held nowhere on it, element by element, with a boolean mask for
    each node and tensor."""
    wanted: dict[tuple[int, str], torch.Tensor] = {}
    for mark, side in ((True, targets), (False, sources)):
        for rank, groups in side.items():
            for group in groups:
                window = tuple(slice(a, a + n) for a, n in zip(*group.region))
                for name in group.names:
                    blank = torch.zeros(group.shard.full, dtype=torch.bool)
                    wanted.setdefault((rank // gpus_per_node, name), blank)[window] = mark
    lacking: Counter = Counter()
    for (node, _), mask in wanted.items():
        lacking[node] += 4 * int(mask.sum())
    return lacking


def brought(plan: Plan, case: tuple) -> None:
    """Every parameter of every worker, bit by bit, and no byte twice."""
    model, train, rollout, _, sources, targets = case
    full = hf_tensors(model)
    shards = {rank: megatron_shards(full, model, train, rank) for rank in sources}
    expected = {rank: vllm_shards(full, model, rollout, rank) for rank in targets}
    got = {
        rank: {key: torch.full_like(value, UNWRITTEN) for key, value in of_rank.items()}
        for rank, of_rank in expected.items()
    }
    moved = simulate(plan, sources, targets, shards, got)
    assert moved == {"sent": plan.bytes_sent, "copied": plan.bytes_local}
    for rank, parameters in expected.items():
        for key, value in parameters.items():
            assert torch.equal(got[rank][key], value), f"rank {rank} {key}"


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_once_into_each_node_and_once_to_each_process(case: tuple) -> None:
    plan, sources, targets = planned(*case)
    is_the_least(plan, sources, targets, case[3])
    brought(plan, (*case, sources, targets))


@settings(max_examples=25, derandomize=True)
@given(st.data())
def test_random_layouts_and_nodes(data: st.DataObject) -> None:
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    tp, pp, dp = pick(1, 2, 4), pick(1, 2), pick(1, 2, 3)
    model = pick(MODEL, MOE)
    ep = pick(*[n for n in (1, 2, 4) if tp * dp % n == 0]) if model.experts else 1
    train = T(tp=tp, pp=pp, dp=dp, ep=ep)
    rollout_tp = pick(1, 2, 4)
    replicas = pick(1, 2, 3, 5)
    first_rank = pick(0, train.ranks, train.ranks + 3)
    rollout = R(tp=rollout_tp, dp=replicas, first_rank=first_rank)
    case = (model, train, rollout, pick(1, 2, 3, 4, 8))
    plan, sources, targets = planned(*case)
    is_the_least(plan, sources, targets, case[3])
    brought(plan, (*case, sources, targets))


def test_nodes_may_be_any_ranks() -> None:
    """Ranks 0 and 2 are one node, 1 and 3 the other: what is wanted on both goes to one of 1 and 3,
    which passes it on."""
    sources = {0: train_shards(MODEL, T(), 0)}
    targets = {rank: rollout_shards(MODEL, R(dp=3, first_rank=1), rank) for rank in (1, 2, 3)}
    settings = PlanSettings(1 << 20, node_of_rank=(7, 5, 7, 5))
    plan = make_plan(sources, targets, settings)
    size = plan.node_bound
    sent = streams(plan.flows)
    assert plan.bytes_sent == 3 * size and plan.bytes_by_link["across_nodes"] == size
    assert sent[0, 2, "float32"] == size
    assert {pair[:2] for pair in sent} == {(0, 1), (0, 2), (0, 3), (1, 3), (3, 1)}


def test_nodes_without_training_weights_pass_on_what_they_get() -> None:
    """One source of one NIC and four nodes of one rank: one chain, so the source sends one copy."""
    plan, _, _ = planned(MODEL, T(), R(dp=4, first_rank=1), 1)
    sent = streams(plan.flows)
    assert {pair[:2] for pair in sent} == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert set(sent.values()) == {plan.node_bound // 4}


def test_a_program_waits_for_what_it_passes_on() -> None:
    """Two hops behind the source each bucket arrives as many rounds later as are in flight."""
    plan, _, targets = planned(MODEL, T(), R(dp=3, first_rank=1), 1)
    last = {}
    for rank in (1, 2, 3):
        program = compile_program(plan, rank, [], targets[rank])
        arrived = {}
        for index, step in enumerate(program.rounds):
            for message in step.sends:
                assert message.passed_on and arrived[message.begin] <= step.after < index
            arrived |= {message.begin: index for message in step.receives}
        last[rank] = program.rounds[-1].number
    assert last[3] == last[2] > last[1] - 1 >= 0


@pytest.mark.parametrize("rollout_tp", [1, 2, 4, 8])
def test_ranks_hear_from_few_and_share_the_load(rollout_tp: int) -> None:
    """Eight nodes: a cell has one copy of the model, and nobody speaks to another one except on its
    own node."""
    model = replace(MODEL, layers=8, heads=8, kv_heads=8, vocab=1024, hidden=64, ffn=64)
    train = T(tp=4, pp=2, dp=8)
    sources = {rank: train_shards(model, train, rank) for rank in range(64)}
    rollout = R(tp=rollout_tp, dp=64 // rollout_tp)
    targets = {rank: rollout_shards(model, rollout, rank) for rank in range(64)}
    plan = make_plan(sources, targets, PlanSettings(4096, gpus_per_node=8))
    assert num_peers(plan.flows).max() <= 8 + 7
    sent = np.zeros(64)
    np.add.at(sent, plan.flows.source[plan.flows.crosses], plan.flows.size[plan.flows.crosses])
    assert sent.max() <= 1.2 * sent.mean()


def test_programs_are_two_views_of_one_plan() -> None:
    """What one rank sends in a round is what its peer receives in it, in the same order."""
    plan, sources, targets = planned(*CASES[1])
    ends: tuple[dict, dict] = (defaultdict(list), defaultdict(list))
    for rank in sorted({*sources, *targets}):
        program = compile_program(plan, rank, sources.get(rank, []), targets.get(rank, []))
        for step in program.rounds:
            for each, messages in zip(ends, (step.sends, step.receives)):
                for message in messages:
                    contents = [
                        (chunk.tensor, chunk.begin, chunk.region) for chunk in message.chunks
                    ]
                    each[step.number, message.stream].append((message.bucket, contents))
    assert ends[0] == ends[1]


regions = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.integers(1, 5)).map(
    lambda n: Slice(n[:2], n[2:])
)


@settings(max_examples=200, derandomize=True)
@given(st.lists(regions, min_size=1, max_size=4))
def test_common_parts_are_disjoint_and_cover(wanted: list[Slice]) -> None:
    parts = common_parts([[region] for region in wanted])
    assert sum(math.prod(region.shape) for region, _ in parts) == covered(wanted)
    for number, region in enumerate(wanted):
        own = [part for part, receivers in parts if number in receivers]
        assert (
            sum(math.prod(part.shape) for part in own)
            == covered(own, [region])
            == covered([region])
        )


@settings(max_examples=50, derandomize=True)
@given(regions, st.integers(1, 9))
def test_split_covers_evenly(region: Slice, parts: int) -> None:
    pieces = split(region, parts)
    assert sum(math.prod(piece.shape) for piece in pieces) == covered(pieces, [region])
    assert covered(pieces) == covered([region]) and len(pieces) == min(parts, max(region.shape))
    longest = [max(piece.shape) for piece in pieces]
    assert len(pieces) == 1 or max(region.shape) // len(pieces) <= max(longest)
