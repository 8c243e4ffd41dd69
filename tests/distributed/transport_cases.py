"""Every rank of ``test_transport.py``: layout pairs over real gloo messages, then faults."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime.digest import Kind
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.planner.plan import Plan, PlanSettings, make_plan
from megatron_rl.weight_sync.planner.program import compile_program
from megatron_rl.weight_sync.planner.shards import ShardGroup
from megatron_rl.weight_sync.reshard import ReshardSync, exchange
from megatron_rl.weight_sync.transport import Transport
from tests.distributed.transport_faults import (
    Sink,
    Source,
    Tensors,
    changed_on_the_wire,
    expect_error,
    no_room,
    raised_in_the_middle,
)
from tests.unit.weight_sync.slow_layouts import (
    UNWRITTEN,
    hf_tensors,
    megatron_shards,
    tensors,
    vllm_shards,
)
from tests.unit.weight_sync.training_tables import TrainLayout, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.plan_figures import peak_staging_bytes

DENSE = ModelShape(
    layers=4,
    hidden=16,
    heads=8,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    vocab=90,
    tied=True,
    qkv_bias=True,
    dtype="float32",
)
MOE = replace(
    DENSE,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    experts=4,
    moe_ffn=8,
    shared_ffn=8,
    dtype="bfloat16",
)
T, R = TrainLayout, RolloutLayout
CASES = {
    2: [
        (DENSE, T(tp=2), R(tp=1, dp=2)),
        (DENSE, T(pp=2), R(tp=2)),
        (DENSE, T(dp=2), R(tp=2)),
        (DENSE, T(pp=2, vpp=2), R(tp=1, dp=2)),
        (DENSE, T(), R(first_rank=1)),
        (MOE, T(tp=2, ep=2), R(tp=2)),
        (MOE, T(ep=2, dp=2), R(tp=2, ep=2)),
    ],
    4: [
        (DENSE, T(tp=2, pp=2), R(tp=1, dp=4)),
        (DENSE, T(tp=4), R(tp=2, dp=2)),
        (DENSE, T(tp=1, pp=4), R(tp=4)),
        (DENSE, T(tp=2, dp=2), R(tp=4)),
        (DENSE, T(tp=2, cp=2), R(tp=1, dp=4)),
        (DENSE, T(pp=3, first_layers=1, last_layers=1), R(first_rank=3)),
        (DENSE, T(tp=2), R(tp=2, first_rank=2)),
        (MOE, T(tp=2, pp=2, ep=2), R(tp=4)),
        (MOE, T(tp=2, dp=2, ep=4), R(tp=2, dp=2, ep=4)),
        (MOE, T(tp=2, etp=2, ep=2, dp=2), R(tp=1, dp=4)),
    ],
}


Case = tuple[ModelShape, TrainLayout, RolloutLayout]


def tables(case: Case) -> tuple[list[ShardGroup], list[ShardGroup]]:
    """What this rank has, and what it wants."""
    model, train, rollout = case
    rank = dist.get_rank()
    sources = train_shards(model, train, rank) if rank < train.ranks else []
    targets = rollout_shards(model, rollout, rank) if rank in rollout.ranks else []
    return sources, targets


def expected_weights(case: Case) -> Tensors:
    """Of this rank's worker, cut from the whole tensors."""
    model, _, rollout = case
    if dist.get_rank() not in rollout.ranks:
        return {}
    return vllm_shards(hf_tensors(model), model, rollout, dist.get_rank())


def blank(parameters: Tensors) -> Tensors:
    return {key: torch.full_like(value, UNWRITTEN) for key, value in parameters.items()}


def equal(got: Tensors, expected: Tensors) -> bool:
    return all(torch.equal(got[key], value) for key, value in expected.items())


def prepare(
    case: Case, bucket_bytes: int, rounds_in_flight: int
) -> tuple[Plan, Transport, Tensors, Tensors, Tensors]:
    """(plan, transport, training parameters, expected worker parameters, target) of this rank."""
    model, train, rollout = case
    rank = dist.get_rank()
    own_sources, own_targets = tables(case)
    sources, targets = exchange(own_sources, own_targets)
    assert sorted(sources) == list(range(train.ranks)) and sorted(targets) == list(rollout.ranks)
    settings = PlanSettings(
        bucket_bytes, rounds_in_flight, gpus_per_node=2, replicas=rollout.replicas
    )
    plan = make_plan(sources, targets, settings)
    transport = Transport(compile_program(plan, rank, own_sources, own_targets))
    source = megatron_shards(hf_tensors(model), model, train, rank) if own_sources else {}
    expected = expected_weights(case)
    return plan, transport, source, expected, blank(expected)


def run_case(number: int, case: Case) -> None:
    bucket_bytes, rounds_in_flight = (208, 1024, 1 << 20)[number % 3], 1 + number % 3
    plan, transport, source, expected, target = prepare(case, bucket_bytes, rounds_in_flight)
    completed: list[str] = []
    report = transport.run(tensors(source), tensors(target), completed.append)
    assert equal(target, expected), f"case {number}, rank {dist.get_rank()}"
    # A vocabulary shard may be all padding.
    filled = [key for key, value in expected.items() if (value != UNWRITTEN).any()]
    assert sorted(completed) == sorted(filled), "every parameter is reported complete once"
    totals = torch.tensor([report.bytes_sent, report.bytes_received, report.bytes_copied])
    dist.all_reduce(totals)
    assert totals.tolist() == [plan.lower_bound, plan.lower_bound, plan.bytes_local]
    planned = peak_staging_bytes(plan.schedule).get(dist.get_rank(), 0)
    rounding = 15 * len(transport.messages)
    most = 2 * rounds_in_flight * bucket_bytes + rounding
    assert planned <= report.peak_staging_bytes <= most
    for value in source.values():  # a second run with new values uses the same program
        value.add_(1)
    transport.run(tensors(source), tensors(target))
    new = {
        key: torch.where(value == UNWRITTEN, value, value + 1) for key, value in expected.items()
    }
    assert equal(target, new), f"case {number}, second run, rank {dist.get_rank()}"


def refused_everywhere(case: Case) -> None:
    """A parameter of rank 1 changes: every rank raises the same named error before a byte moves,
    and the next sync is right."""
    _, transport, source, expected, target = prepare(case, 1024, 2)
    transport.check_sources(tensors(source))
    transport.run(tensors(source), tensors(target))
    key = "0:decoder.layers.0.mlp.linear_fc1.weight"
    changes = {
        "float64": lambda value: value.double(),
        "spans": lambda value: value[:1],
        "first seen": lambda value: torch.cat([value, value]),
    }
    for word, change in changes.items():
        wrong = {**source, key: change(source[key])} if dist.get_rank() == 1 else source
        expect_error(
            ValueError,
            lambda wrong=wrong: transport.check_sources(tensors(wrong)),
            "rank 1",
            key,
            word,
        )
    missing = (
        {name: value for name, value in source.items() if name != key}
        if dist.get_rank() == 1
        else source
    )
    expect_error(ValueError, lambda: transport.check_sources(tensors(missing)), key, "not among")
    norm = "model.norm.weight"
    planned = transport.program.targets[norm]
    expect_error(
        ValueError,
        lambda: transport.check("rollout", norm, planned, target[norm][:1]),
        "rollout",
        "spans 1",
    )
    transport.run(tensors(source), tensors(target))
    assert equal(target, expected)


def sides(case: Case, expected: Tensors) -> tuple[Source | None, Sink | None]:
    model, train, rollout = case
    rank = dist.get_rank()
    sources, targets = tables(case)
    source = sink = None
    if sources:
        source = Source(megatron_shards(hf_tensors(model), model, train, rank), sources)
    if targets:
        sink = Sink(blank(expected), targets, (rank - rollout.first_rank) // rollout.tp)
    return source, sink


def whole_sync(case: Case, kind: Kind) -> None:
    """From shards to a report; a changed source leaves the engine as it was; a byte changed on the
    wire is named and leaves it unusable."""
    expected = expected_weights(case)
    source, sink = sides(case, expected)
    sync = ReshardSync(source, sink, TransferOptions(bucket_mib=1), gpus_per_node=2)
    sync._transport.kind = kind  # both run on a CPU
    report = sync.sync(version=3)
    assert report.version == 3
    if sink is not None:
        assert equal(sink.parameters, expected)
        assert sink.version == 3 and sink.usable and sink.written > 0
        wanted = sum(int((value != UNWRITTEN).sum()) for value in expected.values())
        assert report.bytes_total == wanted * expected["model.norm.weight"].element_size()
    key = "0:embedding.word_embeddings.weight"
    if dist.get_rank() == 0:
        kept = source.parameters[key]
        source.parameters[key] = kept.double()
    expect_error(ValueError, lambda: sync.sync(4), "rank 0", key, "float64")
    assert sink is None or (sink.usable and sink.version == 3), (
        "nothing moved, so the old weights serve on"
    )
    if dist.get_rank() == 0:
        source.parameters[key] = kept
    no_room(sync)
    assert sink is None or (sink.usable and sink.version == 3)
    changed_on_the_wire(sync)
    assert sink is None or (not sink.usable and sink.version == 3)
    raised_in_the_middle(sync, source, sink)
    if sink is not None:
        sink.usable = True
    sync.sync(7)
    assert sink is None or (sink.version == 7 and equal(sink.parameters, expected))


def peer_dies(case: Case) -> bool:
    """The last rank dies inside a sync: each survivor that talks to it raises an error with ranks
    and tensors, and returns True."""
    _, transport, source, _, target = prepare(case, 208, 2)
    if dist.get_rank() == dist.get_world_size() - 1:
        served = []

        def die(key: str) -> torch.Tensor:
            served.append(key)
            if len(served) > 8:
                os._exit(0)
            return source[key]

        transport.run(die, tensors(target))
    expect_error(
        WeightSyncError,
        lambda: transport.run(tensors(source), tensors(target)),
        "round",
        "rank",
        "model.",
        "half updated",
    )
    return True
