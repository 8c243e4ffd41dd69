"""Whole syncs over real messages between processes that stand for nodes: each byte crosses once,
and is passed on from there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync import transport as transport_module
from megatron_rl.weight_sync.reshard import ReshardSync
from tests.distributed.transport_faults import Sink, Source
from tests.ranks import on_ranks
from tests.unit.weight_sync.slow_layouts import UNWRITTEN, hf_tensors, megatron_shards, vllm_shards
from tests.unit.weight_sync.training_tables import TrainLayout, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards

MODEL = ModelShape(
    layers=4, hidden=16, heads=8, kv_heads=2, head_dim=4, ffn=24, vocab=90, dtype="float32"
)
T, R = TrainLayout, RolloutLayout
TWO = [  # training, rollout, ranks of a node
    (T(tp=2), R(dp=2), 1),
    (T(pp=2), R(tp=2), 1),
    (T(), R(first_rank=1), 1),
]
FOUR = [
    (T(tp=2, pp=2), R(dp=4), 2),
    (T(tp=4), R(tp=2, dp=2), 2),
    (T(tp=2), R(dp=2, first_rank=2), 2),
    (T(tp=2), R(tp=2, first_rank=2), 2),
    (T(), R(dp=3, first_rank=1), 1),  # a chain of three
    (T(), R(dp=3, first_rank=1), 2),  # one mate of the source, and a node of two
]


def synced(train: TrainLayout, rollout: RolloutLayout, gpus_per_node: int, dtype: str) -> None:
    """Two syncs of changing weights, from float32 to engines of ``dtype``: every parameter is cut
    from the whole tensors and cast; the bytes that crossed are counted on the wire."""
    rank = dist.get_rank()
    wanted = replace(MODEL, dtype=dtype)
    full = hf_tensors(MODEL)
    source = sink = None
    if rank < train.ranks:
        own = train_shards(MODEL, train, rank)
        source = Source(megatron_shards(full, MODEL, train, rank), own)
    if rank in rollout.ranks:
        cut = vllm_shards(full, MODEL, rollout, rank)
        blank = {
            key: torch.full_like(value, UNWRITTEN, dtype=getattr(torch, dtype))
            for key, value in cut.items()
        }
        replica = (rank - rollout.first_rank) // rollout.tp
        sink = Sink(blank, rollout_shards(wanted, rollout, rank), replica)
    options = TransferOptions(bucket_mib=1, cast=dtype != MODEL.dtype)
    sync = ReshardSync(source, sink, options, gpus_per_node=gpus_per_node)
    crossed: Counter[bool] = Counter()
    packed = transport_module._TransportRun.packed

    def counted(run, message, buffer):
        ends = message.stream
        crossed[ends.source // gpus_per_node != ends.target // gpus_per_node] += buffer.numel()
        packed(run, message, buffer)

    transport_module._TransportRun.packed = counted
    for version in (1, 2):
        sync.sync(version)
        if sink is not None:
            for key, value in cut.items():
                want = value.to(getattr(torch, dtype))
                want[value == UNWRITTEN] = UNWRITTEN
                assert torch.equal(sink.parameters[key], want), f"rank {rank} {key}"
            cut = {k: torch.where(v == UNWRITTEN, v, v + 1) for k, v in cut.items()}
        if source is not None:
            for value in source.parameters.values():
                value.add_(1)
    totals = torch.tensor([crossed[True], crossed[False]])
    dist.all_reduce(totals)
    within = sync.plan.bytes_by_link["same_node"]
    assert totals.tolist() == [2 * sync.plan.node_bound, 2 * within]
    assert sum(totals.tolist()) == 2 * sync.plan.lower_bound


@pytest.mark.parametrize("case", range(len(TWO)))
@on_ranks(2)
def test_two_processes_as_two_nodes(case: int) -> None:
    synced(*TWO[case], "float32")


@pytest.mark.parametrize("case", range(len(FOUR)))
@on_ranks(4)
def test_four_processes_as_nodes(case: int) -> None:
    synced(*FOUR[case], "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@on_ranks(2)
def test_values_are_cast_before_they_are_sent(dtype: str) -> None:
    """Half the bytes cross, and the values are those of a cast of the whole tensor."""
    synced(*TWO[0], dtype)


@on_ranks(4)
def test_values_that_are_passed_on_are_cast_once() -> None:
    synced(*FOUR[4], "bfloat16")
