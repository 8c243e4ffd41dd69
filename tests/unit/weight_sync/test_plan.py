"""Every (training layout, rollout layout) pair ends with the shards that plain code cuts from the
whole tensors, at the least cost."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.plan import PlanSettings, make_plan
from megatron_rl.weight_sync.planner.shards import (
    ShardGroup,
    check_written_once,
    collect,
    count_tensors,
)
from tests.unit.weight_sync.slow_layouts import (
    UNWRITTEN,
    hf_tensors,
    megatron_shards,
    simulate,
    vllm_shards,
)
from tests.unit.weight_sync.training_tables import TrainLayout, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.plan_figures import peak_staging_bytes, streams
from tools.planning.shard_table import expand

LLAMA = ModelShape(
    layers=4, hidden=12, heads=8, kv_heads=2, head_dim=4, ffn=24, vocab=90, dtype="float32"
)
QWEN2 = replace(LLAMA, tied=True, qkv_bias=True)
QWEN3 = replace(LLAMA, kv_heads=4, qk_norm=True, tied=True, vocab=128)
MHA = replace(LLAMA, kv_heads=8, dtype="bfloat16")
MOE = ModelShape(
    layers=4,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=16,
    vocab=70,
    qk_norm=True,
    experts=8,
    moe_ffn=8,
    dtype="float32",
)
SHARED = replace(MOE, shared_ffn=16, dense_layers=(1,), qk_norm=False, qkv_bias=True)
MIXTRAL = replace(MOE, qk_norm=False, expert_names="mixtral", layers=2)

T, R = TrainLayout, RolloutLayout
PAIRS = [
    (LLAMA, T(), R()),
    (LLAMA, T(tp=2), R(tp=1, dp=2)),
    (LLAMA, T(tp=4, pp=2), R(tp=1, dp=8)),
    (LLAMA, T(tp=4, pp=2), R(tp=8, dp=1)),
    (LLAMA, T(tp=2, pp=2, dp=2), R(tp=4, dp=2)),
    (LLAMA, T(tp=2, pp=2, dp=2), R(tp=2, dp=4)),
    (LLAMA, T(tp=1, pp=4), R(tp=4, dp=1)),
    (LLAMA, T(tp=1, pp=1, dp=4), R(tp=4)),
    (LLAMA, T(tp=8, dp=2), R(tp=4, dp=4)),
    (LLAMA, T(pp=2, vpp=2, tp=2), R(tp=2, dp=2)),
    (LLAMA, T(pp=3, first_layers=1, last_layers=1), R(tp=1, dp=3)),
    (LLAMA, T(pp=3, first_layers=2, tp=2), R(tp=2, dp=3)),
    (LLAMA, T(pp=2, last_layers=1, tp=2), R(tp=4)),
    (LLAMA, T(tp=2, cp=2, dp=2), R(tp=2, dp=4)),
    (LLAMA, T(tp=2, pp=2), R(tp=2, dp=1, first_rank=4)),
    (LLAMA, T(tp=2, pp=2), R(tp=4, dp=2, first_rank=4)),
    (QWEN2, T(tp=2, pp=2), R(tp=1, dp=4)),
    (QWEN2, T(tp=4), R(tp=2, dp=2)),
    (QWEN2, T(tp=8), R(tp=8)),
    (QWEN2, T(tp=1, pp=2, vpp=2, dp=2), R(tp=4)),
    (QWEN3, T(tp=2, pp=2, cp=2), R(tp=8)),
    (QWEN3, T(tp=8), R(tp=2, dp=4)),
    (QWEN3, T(dp=3), R(tp=1, dp=3)),
    (MHA, T(tp=4, dp=2), R(tp=2, dp=4)),
    (MHA, T(tp=2, pp=4), R(tp=8)),
    (MOE, T(ep=2, dp=2), R(tp=2)),
    (MOE, T(tp=2, ep=4, dp=2), R(tp=2, dp=2)),
    (MOE, T(tp=2, ep=4, dp=2), R(tp=2, dp=2, ep=4)),
    (MOE, T(tp=2, ep=2, etp=2, dp=4, pp=2), R(tp=4, dp=4, ep=8)),
    (MOE, T(tp=2, pp=2, vpp=2, ep=2), R(tp=2, dp=2, ep=2)),
    (MOE, T(tp=1, cp=2, dp=3, ep=2), R(tp=2, dp=3, ep=6)),
    (MOE, T(tp=2, ep=2), R(tp=2, dp=1, first_rank=2)),
    (SHARED, T(tp=2, ep=2, pp=2), R(tp=4)),
    (SHARED, T(tp=4, etp=4), R(tp=2, dp=2, ep=2)),
    (MIXTRAL, T(tp=2, ep=8, dp=4), R(tp=4, dp=2)),
    (MIXTRAL, T(tp=2, etp=2, ep=2, dp=2), R(tp=2, dp=2, ep=4)),
]


def resharded(
    model: ModelShape,
    train: TrainLayout,
    rollout: RolloutLayout,
    bucket_bytes: int,
    rounds_in_flight: int,
    gpus_per_node: int,
) -> None:
    """Plan, simulate, compare every parameter of every worker bit by bit, and the bytes with the
    least possible."""
    full = hf_tensors(model)
    sources = {rank: train_shards(model, train, rank) for rank in range(train.ranks)}
    targets = {rank: rollout_shards(model, rollout, rank) for rank in rollout.ranks}
    settings = PlanSettings(
        bucket_bytes, rounds_in_flight, gpus_per_node, replicas=rollout.replicas
    )
    plan = make_plan(sources, targets, settings)
    shards = {rank: megatron_shards(full, model, train, rank) for rank in sources}
    expected = {rank: vllm_shards(full, model, rollout, rank) for rank in targets}
    got = {
        rank: {key: torch.full_like(value, UNWRITTEN) for key, value in expected[rank].items()}
        for rank in expected
    }
    moved = simulate(plan, sources, targets, shards, got)
    for rank, parameters in expected.items():
        for key, value in parameters.items():
            assert torch.equal(got[rank][key], value), f"rank {rank} {key}"
    assert moved == {"sent": plan.bytes_sent, "copied": plan.bytes_local}
    assert plan.bytes_sent == plan.lower_bound == least_bytes(sources, targets)
    peak = max(peak_staging_bytes(plan.schedule).values(), default=0)
    assert peak <= 2 * rounds_in_flight * bucket_bytes


def least_bytes(sources: dict, targets: dict) -> int:
    """Bytes wanted and not held, element by element, with one boolean mask per process and
    tensor."""
    total = 0
    for rank, groups in targets.items():
        masks: dict[str, torch.Tensor] = {}
        for mark, side in ((True, groups), (False, sources.get(rank, []))):
            for group in side:
                for tensor in group.names:
                    mask = masks.setdefault(tensor, torch.zeros(group.shard.full, dtype=torch.bool))
                    mask[window(*group.region)] = mark
        elements = sum(int(mask.sum()) for mask in masks.values())
        total += elements * getattr(torch, groups[0].shard.dtype).itemsize
    return total


def window(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape))


@pytest.mark.parametrize("case", range(len(PAIRS)))
def test_layout_pairs_are_bit_equal_at_least_cost(case: int) -> None:
    model, train, rollout = PAIRS[case]
    resharded(
        model,
        train,
        rollout,
        bucket_bytes=(1 << 20, 208, 1024, 304)[case % 4],
        rounds_in_flight=1 + case % 3,
        gpus_per_node=(2, 4, 8)[case % 3],
    )


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    tp, rollout_tp, vpp = pick(1, 2, 4), pick(1, 2, 4), pick(1, 2)
    pp = pick(1, 2, 3) if vpp == 1 else 2
    kv = pick(1, 2, 4)
    experts = pick(0, 0, 4)
    cp, dp = pick(1, 2), pick(1, 2)
    etp = pick(*[n for n in (1, 2) if experts and tp * cp * dp % n == 0], 1)
    ep = pick(*[n for n in (1, 2, 4) if experts and tp * cp * dp % (n * etp) == 0], 1)
    model = ModelShape(
        layers=vpp * pp * pick(1, 2),
        hidden=pick(4, 6, 10),
        heads=4 * pick(1, 2),
        kv_heads=kv,
        head_dim=pick(2, 4),
        ffn=4 * pick(1, 3),
        vocab=pick(1, 63, 64, 130),
        tied=pick(True, False),
        qkv_bias=pick(True, False),
        qk_norm=pick(True, False),
        experts=experts,
        moe_ffn=4,
        dtype=pick("float32", "bfloat16"),
    )
    train = TrainLayout(
        tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, ep=ep, etp=etp, vocab_multiple=pick(1, 8, 128)
    )
    replicas = pick(1, 2, 3)
    rollout_ep = (
        rollout_tp * replicas if experts >= rollout_tp * replicas and pick(True, False) else 1
    )
    rollout = RolloutLayout(tp=rollout_tp, dp=replicas, ep=rollout_ep, first_rank=pick(0, 1, 50))
    resharded(
        model,
        train,
        rollout,
        bucket_bytes=data.draw(st.integers(100, 3000)),
        rounds_in_flight=pick(1, 2, 3),
        gpus_per_node=pick(1, 2, 3, 8),
    )


def group(
    name: str = "w",
    start: tuple = (0, 0),
    shape: tuple = (2, 4),
    key: str = "p",
    offset: int = 0,
    full: tuple = (4, 4),
    dtype: str = "float32",
) -> ShardGroup:
    return collect([Shard(name, full, start, shape, offset, (4, 1), key, dtype)])[0]


LOW, HIGH, WHOLE = group(), group(start=(2, 0), key="q"), group(shape=(4, 4))


def plan_of(sources: dict, targets: dict, **options: object):
    settings = PlanSettings(**{"gpus_per_node": 2, "bucket_bytes": 64, **options})
    return make_plan(sources, targets, settings)


def test_local_copy_then_same_node_then_far_are_preferred() -> None:
    """Four holders of everything on two nodes: rank 1 takes its own half, the rest from rank 0 of
    its node."""
    plan = plan_of({0: [WHOLE], 1: [LOW], 2: [WHOLE], 3: [WHOLE]}, {1: [WHOLE]})
    assert streams(plan.flows) == {(0, 1, "float32"): 32}
    assert dict(plan.bytes_by_link) == {"same_process": 32, "same_node": 32, "across_nodes": 0}
    far = plan_of({0: [WHOLE], 1: [WHOLE]}, {2: [WHOLE]})
    assert far.bytes_by_link["across_nodes"] == 64 and far.bytes_local == 0


def test_equal_holders_share_the_load() -> None:
    """Two holders on the other node, one taker, four tensors of 64 bytes: 128 bytes each."""
    tensors = tuple(f"w{i}" for i in range(4))
    many = replace(WHOLE, names=tensors, keys=tensors)
    plan = plan_of({0: [many], 1: [many]}, {2: [many]})
    assert streams(plan.flows) == {(0, 2, "float32"): 128, (1, 2, "float32"): 128}


def test_wanted_twice_by_one_process_travels_once() -> None:
    """A tensor that lands whole in two parameters, and its lower rows in a third: 64 bytes on the
    wire, all three places filled."""
    sources = {0: [WHOLE]}
    places = [replace(HIGH, keys=("c",)), replace(WHOLE, keys=("a",)), replace(WHOLE, keys=("b",))]
    for targets, bucket_bytes in (({1: places}, 32), ({1: places[::-1]}, 64)):
        plan = plan_of(sources, targets, bucket_bytes=bucket_bytes)
        assert plan.bytes_sent == plan.lower_bound == 64
        source = torch.arange(16.0).view(4, 4)
        got = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4), "c": torch.zeros(2, 4)}
        simulate(plan, sources, targets, {0: {"p": source}}, {1: got})
        assert torch.equal(got["a"], source) and torch.equal(got["b"], source)
        assert torch.equal(got["c"], source[2:])


def test_transposed_target() -> None:
    """A parameter kept as the transpose: the strides of the shard are swapped."""
    sources = {0: [WHOLE]}
    swapped = replace(WHOLE, keys=("t",), shard=replace(WHOLE.shard, stride=(1, 4)))
    targets = {1: [swapped]}
    source, target = torch.arange(16.0).view(4, 4), torch.zeros(4, 4)
    plan = plan_of(sources, targets, bucket_bytes=48)
    simulate(plan, sources, targets, {0: {"p": source}}, {1: {"t": target}})
    assert torch.equal(target, source.T)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (
            {0: [LOW]},
            {1: [WHOLE]},
            r"w\[2:4, 0:4\].*needed by rank 1 but held by no training rank.*\[0\]",
        ),
        ({}, {1: [WHOLE]}, r"w\[0:4, 0:4\].*needed by rank 1 but held by no training rank"),
        (
            {0: [WHOLE]},
            {1: [LOW]},
            (
                r"w\[2:4, 0:4\].*held by the training ranks \[0\] but needed by none of the rollout"
                r" ranks \[1\]"
            ),
        ),
        ({0: [WHOLE, group("lost")]}, {1: [WHOLE]}, r"lost\[0:4, 0:4\].*needed by none"),
        (
            {0: [WHOLE]},
            {1: [group(shape=(4, 4), full=(5, 4))]},
            r"w: rank 0 has shape \(4, 4\).*rank 1 \(rollout\) has shape \(5, 4\)",
        ),
        (
            {0: [WHOLE]},
            {1: [group(shape=(4, 4), dtype="bfloat16")]},
            r"w: rank 0 .*dtype float32, rank 1 \(rollout\).*dtype bfloat16",
        ),
        (
            {0: [WHOLE]},
            {1: [group(shape=(5, 4))]},
            r"w: rank 1 names \[0:5, 0:4\].*outside of its shape \(4, 4\)",
        ),
        (
            {0: [WHOLE]},
            {1: [LOW, group(start=(2, 0), offset=4)]},
            (
                r"rank 1: element 4 of parameter 'p' would be written twice, by w\[0:2, 0:4\] and"
                r" by w\[2:4, 0:4\]"
            ),
        ),
        (
            {0: [group(dtype="complex64")]},
            {0: [group(dtype="complex64")]},
            r"dtype 'complex64' is not one of",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(sources: dict, targets: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(sources, targets)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_engines_of_two_types_are_refused_where_values_are_cast(dtypes: tuple[str, str]) -> None:
    """A tensor travels in one type: the engine of the wider one would be given rounded values."""
    targets = {
        rank: [group(shape=(4, 4), dtype=dtype)] for rank, dtype in enumerate(dtypes, start=1)
    }
    with pytest.raises(ValueError, match=r"w: rank 2 .*rank 1 \(rollout\) has shape"):
        plan_of({0: [WHOLE]}, targets, cast=True, replicas=[[1], [2]])


def test_every_replica_must_want_everything() -> None:
    with pytest.raises(ValueError, match=r"w\[2:4, 0:4\].*none of the rollout ranks \[2\]"):
        plan_of({0: [WHOLE]}, {1: [WHOLE], 2: [LOW]}, replicas=[[1], [2]])


def test_two_tensors_on_one_place_are_a_double_write() -> None:
    clash = collect(
        [Shard(name, (4, 4), (0, 0), (4, 4), 0, (4, 1), "p", "float32") for name in ("a", "b")]
    )
    with pytest.raises(
        ValueError,
        match=r"rank 7: element 0 of parameter 'p' would be written twice, by a.* and by b",
    ):
        check_written_once(7, clash)


def test_collect_groups_equal_shards() -> None:
    common = Shard("", (4, 4), (0, 0), (2, 4), 0, (4, 1), dtype="float32")
    shards = [replace(common, name=f"w{i}", key=f"p{i}") for i in range(3)]
    groups = collect(shards)
    assert groups == [ShardGroup(("w0", "w1", "w2"), ("p0", "p1", "p2"), common)]
    assert expand(groups) == shards


def test_experts_of_one_tensor_are_planned_apart() -> None:
    """The two last of three matrices of (2, 4), which are columns and rows of the parameter."""
    both = Shard("w", (3, 2, 4), (1, 0, 0), (2, 2, 4), 5, (8, 1, 2), "p", "float32")
    one = Shard("", (2, 4), (0, 0), (2, 4), 5, (1, 2), dtype="float32")
    groups = collect([both])
    assert groups == [
        ShardGroup(("w[1]",), ("p",), one),
        ShardGroup(("w[2]",), ("p",), replace(one, offset=13)),
    ]
    assert count_tensors([*groups[0].names, *groups[1].names, "v"]) == 2


def fields_of(value: Any) -> Any:
    """A plan as nested lists, which compare with ``==``."""
    if is_dataclass(value):
        return [fields_of(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [fields_of(entry) for entry in value]
    return value


def test_equal_inputs_give_equal_plans() -> None:
    model, train, rollout = PAIRS[28]
    sources = {rank: train_shards(model, train, rank) for rank in range(train.ranks)}
    targets = {rank: rollout_shards(model, rollout, rank) for rank in rollout.ranks}

    def bare(group: ShardGroup) -> ShardGroup:
        return ShardGroup(group.names, (), replace(group.shard, offset=0, stride=()))

    def geometry(side: dict) -> dict:
        return {rank: [bare(group) for group in side[rank]] for rank in reversed(side)}

    assert fields_of(plan_of(sources, targets)) == fields_of(
        plan_of(geometry(sources), geometry(targets))
    )
