"""Every (training layout, rollout layout) pair ends with the shards that plain code cuts from the whole tensors, at the least cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.types import Box
from megatron_rl.weight_sync.boxes import Boxes, check_written_once, collect, covered, cut, subtract
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes
from megatron_rl.weight_sync.plan import make_plan
from megatron_rl.weight_sync.schedule import schedule
from tests.unit.weight_sync.slow_layouts import UNWRITTEN, hf_tensors, megatron_shards, simulate, vllm_shards

LLAMA = ModelShape(layers=4, hidden=12, heads=8, kv_heads=2, head_dim=4, ffn=24, vocab=90, dtype="float32")
QWEN2 = replace(LLAMA, tied=True, qkv_bias=True)
QWEN3 = replace(LLAMA, kv_heads=4, qk_norm=True, tied=True, vocab=128)
MHA = replace(LLAMA, kv_heads=8, dtype="bfloat16")
MOE = ModelShape(layers=4, hidden=8, heads=4, kv_heads=2, head_dim=4, ffn=16, vocab=70, qk_norm=True, experts=8, moe_ffn=8, dtype="float32")
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


def resharded(model: ModelShape, train: TrainLayout, rollout: RolloutLayout, bucket_bytes: int, in_flight: int, gpus_per_node: int) -> None:
    """Plan, simulate, compare every parameter of every worker bit by bit, and the bytes with the least possible."""
    full = hf_tensors(model)
    held = {rank: train_boxes(model, train, rank) for rank in range(train.ranks)}
    wanted = {rank: rollout_boxes(model, rollout, rank) for rank in rollout.ranks}
    plan = make_plan(held, wanted, gpus_per_node=gpus_per_node, bucket_bytes=bucket_bytes, in_flight=in_flight, replicas=rollout.replicas)
    shards = {rank: megatron_shards(full, model, train, rank) for rank in held}
    expected = {rank: vllm_shards(full, model, rollout, rank) for rank in wanted}
    got = {rank: {key: torch.full_like(value, UNWRITTEN) for key, value in expected[rank].items()} for rank in expected}
    moved = simulate(plan, held, wanted, shards, got)
    for rank, parameters in expected.items():
        for key, value in parameters.items():
            assert torch.equal(got[rank][key], value), f"rank {rank} {key}"
    assert moved == {"sent": plan.bytes_sent, "copied": plan.bytes_local}
    assert plan.ratio == 1.0 and plan.bytes_sent == plan.lower_bound == least_bytes(held, wanted)
    assert max(plan.schedule.peak_staging_bytes.values(), default=0) <= 2 * in_flight * bucket_bytes


def least_bytes(held: dict, wanted: dict) -> int:
    """Bytes wanted and not held, element by element, with one boolean mask per process and tensor."""
    total = 0
    for rank, groups in wanted.items():
        masks: dict[str, torch.Tensor] = {}
        for mark, sides in ((True, groups), (False, held[rank] if rank in held else [])):
            for box in sides:
                window = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))
                for tensor in box.tensors:
                    masks.setdefault(tensor, torch.zeros(box.full, dtype=torch.bool))[window] = mark
        total += sum(int(mask.sum()) for mask in masks.values()) * getattr(torch, groups[0].dtype).itemsize
    return total


@pytest.mark.parametrize("case", range(len(PAIRS)))
def test_layout_pairs_are_bit_equal_at_least_cost(case: int) -> None:
    model, train, rollout = PAIRS[case]
    resharded(
        model, train, rollout, bucket_bytes=(1 << 20, 208, 1024, 304)[case % 4], in_flight=1 + case % 3, gpus_per_node=(2, 4, 8)[case % 3]
    )


@settings(max_examples=40, deadline=None, derandomize=True)
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
        layers=vpp * pp * pick(1, 2), hidden=pick(4, 6, 10), heads=4 * pick(1, 2), kv_heads=kv, head_dim=pick(2, 4), ffn=4 * pick(1, 3),
        vocab=pick(1, 63, 64, 130), tied=pick(True, False), qkv_bias=pick(True, False), qk_norm=pick(True, False), experts=experts,
        moe_ffn=4, dtype=pick("float32", "bfloat16"),
    )  # fmt: skip
    train = TrainLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, ep=ep, etp=etp, vocab_multiple=pick(1, 8, 128))
    replicas = pick(1, 2, 3)
    rollout_ep = rollout_tp * replicas if experts >= rollout_tp * replicas and pick(True, False) else 1
    rollout = RolloutLayout(tp=rollout_tp, dp=replicas, ep=rollout_ep, first_rank=pick(0, 1, 50))
    resharded(
        model, train, rollout, bucket_bytes=data.draw(st.integers(100, 3000)), in_flight=pick(1, 2, 3), gpus_per_node=pick(1, 2, 3, 8)
    )


def box(
    tensor: str = "w",
    start: tuple = (0, 0),
    shape: tuple = (2, 4),
    key: str = "p",
    offset: int = 0,
    full: tuple = (4, 4),
    dtype: str = "float32",
) -> Boxes:
    return collect([Box(tensor, full, dtype, start, shape, key, offset, (4, 1))])[0]


LOW, HIGH, WHOLE = box(), box(start=(2, 0), key="q"), box(shape=(4, 4))


def plan_of(held: dict, wanted: dict, **options: object):
    return make_plan(held, wanted, **{"gpus_per_node": 2, "bucket_bytes": 64, **options})


def test_local_copy_then_same_node_then_far_are_preferred() -> None:
    """Four holders of everything on two nodes: rank 1 takes its own half, the rest from rank 0 of its node."""
    plan = plan_of({0: [WHOLE], 1: [LOW], 2: [WHOLE], 3: [WHOLE]}, {1: [WHOLE]})
    assert dict(plan.streams) == {(0, 1, "float32"): 32}
    assert dict(plan.bytes_by_link) == {"same_process": 32, "same_node": 32, "across_nodes": 0}
    far = plan_of({0: [WHOLE], 1: [WHOLE]}, {2: [WHOLE]})
    assert far.bytes_by_link["across_nodes"] == 64 and far.bytes_local == 0


def test_equal_holders_share_the_load() -> None:
    """Two holders on the other node, one taker, four tensors of 64 bytes: 128 bytes each."""
    tensors = tuple(f"w{i}" for i in range(4))
    many = replace(WHOLE, tensors=tensors, keys=tensors)
    plan = plan_of({0: [many], 1: [many]}, {2: [many]})
    assert dict(plan.streams) == {(0, 2, "float32"): 128, (1, 2, "float32"): 128}
    # another tensor of 48 bytes, held by rank 0 alone and planned first, shifts one of three equal tensors to rank 1
    first = box("a", shape=(3, 4), full=(3, 4))
    uneven = replace(many, tensors=tensors[:3], keys=tensors[:3])
    plan = plan_of({0: [first, uneven], 1: [uneven]}, {2: [first, replace(uneven, keys=("x", "y", "z"))]})
    assert dict(plan.streams) == {(0, 2, "float32"): 48 + 64, (1, 2, "float32"): 128}


def test_wanted_twice_by_one_process_travels_once() -> None:
    """A tensor that lands whole in two parameters, and its lower rows in a third: 64 bytes on the wire, all three places filled."""
    held = {0: [WHOLE]}
    wanted = {1: [replace(HIGH, keys=("c",)), replace(WHOLE, keys=("a",)), replace(WHOLE, keys=("b",))]}
    for order, bucket_bytes in ((wanted, 32), ({1: wanted[1][::-1]}, 64)):
        plan = plan_of(held, order, bucket_bytes=bucket_bytes)
        assert plan.bytes_sent == plan.lower_bound == 64
        source, a, b, c = torch.arange(16.0).view(4, 4), torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(2, 4)
        simulate(plan, held, order, {0: {"p": source}}, {1: {"a": a, "b": b, "c": c}})
        assert torch.equal(a, source) and torch.equal(b, source) and torch.equal(c, source[2:])


def test_gather_bytes_count_what_every_rollout_process_lacks() -> None:
    """Each of two processes holds half of 64 bytes and would receive the other half."""
    assert plan_of({0: [LOW], 1: [HIGH]}, {0: [LOW], 1: [HIGH]}).gather_bytes == 64


def test_transposed_destination() -> None:
    """A parameter kept as the transpose: the strides of the box are swapped."""
    held, wanted = {0: [WHOLE]}, {1: [replace(WHOLE, keys=("t",), stride=(1, 4))]}
    source, target = torch.arange(16.0).view(4, 4), torch.zeros(4, 4)
    simulate(plan_of(held, wanted, bucket_bytes=48), held, wanted, {0: {"p": source}}, {1: {"t": target}})
    assert torch.equal(target, source.T)


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ({0: [LOW]}, {1: [WHOLE]}, r"w\[2:4, 0:4\].*wanted by rank 1 but held by no training rank.*\[0\]"),
        ({}, {1: [WHOLE]}, r"w\[0:4, 0:4\].*wanted by rank 1 but held by no training rank"),
        ({0: [WHOLE]}, {1: [LOW]}, r"w\[2:4, 0:4\].*held by the training ranks \[0\] but wanted by none of the rollout ranks \[1\]"),
        ({0: [WHOLE, box("lost")]}, {1: [WHOLE]}, r"lost\[0:4, 0:4\].*wanted by none"),
        ({0: [WHOLE]}, {1: [box(shape=(4, 4), full=(5, 4))]}, r"w: rank 0 has shape \(4, 4\).*rank 1 \(rollout\) has shape \(5, 4\)"),
        ({0: [WHOLE]}, {1: [box(shape=(4, 4), dtype="bfloat16")]}, r"w: rank 0 .*dtype float32, rank 1 \(rollout\).*dtype bfloat16"),
        ({0: [WHOLE]}, {1: [box(shape=(5, 4))]}, r"w: rank 1 names \[0:5, 0:4\].*outside of its shape \(4, 4\)"),
        ({0: [WHOLE]}, {1: [LOW, box(start=(2, 0), offset=4)]},
         r"rank 1: element 4 of parameter 'p' would be written twice, by w\[0:2, 0:4\] and by w\[2:4, 0:4\]"),
        ({0: [box(dtype="complex64")]}, {0: [box(dtype="complex64")]}, r"dtype 'complex64' is not one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(held: dict, wanted: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(held, wanted)


def test_tensor_wanted_by_nobody_can_be_ignored_by_name() -> None:
    plan = plan_of({0: [WHOLE, box("bias", full=(2, 4))]}, {1: [WHOLE]}, ignore=["bias"])
    assert plan.bytes_sent == 64


def test_every_replica_must_want_everything() -> None:
    with pytest.raises(ValueError, match=r"w\[2:4, 0:4\].*none of the rollout ranks \[2\]"):
        plan_of({0: [WHOLE]}, {1: [WHOLE], 2: [LOW]}, replicas=[[1], [2]])


def test_two_tensors_on_one_place_are_a_double_write() -> None:
    clash = collect([Box(name, (4, 4), "float32", (0, 0), (4, 4), "p", 0, (4, 1)) for name in ("a", "b")])
    with pytest.raises(ValueError, match=r"rank 7: element 0 of parameter 'p' would be written twice, by a.* and by b"):
        check_written_once(7, clash)


def test_collect_groups_equal_boxes() -> None:
    boxes = [Box(f"w{i}", (4, 4), "float32", (0, 0), (2, 4), f"p{i}", 0, (4, 1)) for i in range(3)]
    assert collect(boxes) == [Boxes(("w0", "w1", "w2"), (4, 4), "float32", (0, 0), (2, 4), ("p0", "p1", "p2"), 0, (4, 1))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 130))
def test_cut_keeps_row_major_order(dims: list[tuple[int, int]], count: int) -> None:
    start, shape = tuple(a for a, _ in dims), tuple(n for _, n in dims)
    numbers = torch.arange(10 ** len(dims)).view((10,) * len(dims))
    take = lambda s, n: numbers[tuple(slice(a, a + m) for a, m in zip(s, n))].flatten()  # noqa: E731
    head, tail = cut((start, shape), count)
    assert torch.equal(torch.cat([take(*rect) for rect in head + tail]), take(start, shape))
    assert sum(math.prod(n) for _, n in head) == min(count, math.prod(shape))


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 4)] * 2), min_size=2, max_size=5))
def test_subtract_and_covered_agree_with_masks(rects: list[tuple[int, ...]]) -> None:
    boxes = [((a, b), (m, n)) for a, b, m, n in rects]
    masks = [torch.zeros(10, 10, dtype=torch.bool) for _ in boxes]
    for mask, (s, n) in zip(masks, boxes):
        mask[s[0] : s[0] + n[0], s[1] : s[1] + n[1]] = True
    union = torch.stack(masks[1:]).any(0)
    assert covered(boxes[1:]) == union.sum()
    assert covered(boxes[1:], boxes[:1]) == (union & masks[0]).sum()
    rest = torch.zeros(10, 10, dtype=torch.int)
    for s, n in subtract(boxes[0], boxes[1]):
        rest[s[0] : s[0] + n[0], s[1] : s[1] + n[1]] += 1
    assert torch.equal(rest, (masks[0] & ~masks[1]).int())


def test_schedule_bounds_every_round_and_loses_no_byte() -> None:
    """Four processes, all pairs, 100 bytes a pair, buckets of 48: no process sends or receives more than 48 bytes in a round."""
    streams = {(a, b, "uint8"): 100 for a in range(4) for b in range(4) if a != b}
    result = schedule(streams, 50, in_flight=2)
    per_round: dict[tuple[str, int, int], int] = {}
    for bucket in result.buckets:
        src, dst, _ = bucket.stream
        for side in (("send", src, bucket.round), ("receive", dst, bucket.round)):
            per_round[side] = per_round[side] + bucket.size if side in per_round else bucket.size
    assert max(per_round.values()) <= 48 and max(result.peak_staging_bytes.values()) <= 4 * 48
    for stream, total in streams.items():
        spans = sorted((b.begin, b.begin + b.size) for b in result.buckets if b.stream == stream)
        assert [a for a, _ in spans] == [0, *[b for _, b in spans[:-1]]] and spans[-1][1] == total


@pytest.mark.parametrize(("in_flight", "peak"), [(1, 48), (2, 96), (3, 100)])
def test_peak_staging_counts_the_rounds_in_flight(in_flight: int, peak: int) -> None:
    """100 bytes in rounds of 48, 48 and 4."""
    result = schedule({(0, 1, "uint8"): 100}, 48, in_flight)
    assert result.rounds == 3 and result.peak_staging_bytes == {0: peak, 1: peak}


@pytest.mark.parametrize(("size", "flights"), [(15, 1), (64, 0)])
def test_schedule_refuses_sizes_that_cannot_work(size: int, flights: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes={size}, in_flight={flights}"):
        schedule({}, size, flights)


def test_equal_inputs_give_equal_plans() -> None:
    model, train, rollout = PAIRS[28]
    held = {rank: train_boxes(model, train, rank) for rank in range(train.ranks)}
    wanted = {rank: rollout_boxes(model, rollout, rank) for rank in rollout.ranks}
    geometry = {rank: [group.geometry() for group in groups] for rank, groups in reversed(held.items())}
    assert plan_of(held, wanted) == plan_of(geometry, {rank: [group.geometry() for group in groups] for rank, groups in wanted.items()})
