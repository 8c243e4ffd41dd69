"""Runs on every rank: many layout pairs over real gloo messages, then the faults. Prints one line per passed case on rank 0."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.runtime.digest import Kind, WeightSyncError
from megatron_rl.types import Box
from megatron_rl.weight_sync import transport as transport_module
from megatron_rl.weight_sync.boxes import Boxes, expand, slices
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes
from megatron_rl.weight_sync.plan import make_plan
from megatron_rl.weight_sync.program import compile_program
from megatron_rl.weight_sync.reshard import ReshardSync
from megatron_rl.weight_sync.transport import Transport, exchange, tensors
from tests.unit.weight_sync.slow_layouts import UNWRITTEN, hf_tensors, megatron_shards, vllm_shards

DENSE = ModelShape(layers=4, hidden=16, heads=8, kv_heads=2, head_dim=4, ffn=24, vocab=90, tied=True, qkv_bias=True, dtype="float32")
MOE = replace(DENSE, tied=False, qkv_bias=False, qk_norm=True, experts=4, moe_ffn=8, shared_ffn=8, dtype="bfloat16")
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


def prepare(case: tuple[ModelShape, TrainLayout, RolloutLayout], bucket_bytes: int, in_flight: int) -> tuple:
    """(plan, transport, training parameters, expected worker parameters, destination) of this rank."""
    model, train, rollout = case
    rank = dist.get_rank()
    mine = train_boxes(model, train, rank) if rank < train.ranks else []
    wishes = rollout_boxes(model, rollout, rank) if rank in rollout.ranks else []
    held, wanted = exchange(mine, wishes)
    assert sorted(held) == list(range(train.ranks)) and sorted(wanted) == list(rollout.ranks)
    plan = make_plan(held, wanted, gpus_per_node=2, bucket_bytes=bucket_bytes, in_flight=in_flight, replicas=rollout.replicas)
    transport = Transport(compile_program(plan, rank, mine, wishes))
    full = hf_tensors(model)
    source = megatron_shards(full, model, train, rank) if mine else {}
    expected = vllm_shards(full, model, rollout, rank) if wishes else {}
    target = {key: torch.full_like(value, UNWRITTEN) for key, value in expected.items()}
    return plan, transport, source, expected, target


def run_case(number: int, case: tuple[ModelShape, TrainLayout, RolloutLayout]) -> None:
    bucket_bytes, in_flight = (208, 1024, 1 << 20)[number % 3], 1 + number % 3
    plan, transport, source, expected, target = prepare(case, bucket_bytes, in_flight)
    completed: list[str] = []
    report = transport.run(tensors(source), tensors(target), completed.append)
    for key, value in expected.items():
        assert torch.equal(target[key], value), f"case {number}, rank {dist.get_rank()}: {key}"
    filled = [key for key, value in expected.items() if (value != UNWRITTEN).any()]  # a vocabulary shard may be all padding
    assert sorted(completed) == sorted(filled), "every parameter is reported complete once"
    totals = torch.tensor([report.bytes_sent, report.bytes_received, report.bytes_copied])
    dist.all_reduce(totals)
    assert totals.tolist() == [plan.lower_bound, plan.lower_bound, plan.bytes_local]
    planned = plan.schedule.peak_staging_bytes
    buffers, rounding = report.peak_staging_bytes, 15 * len(transport.messages)
    assert (planned[dist.get_rank()] if dist.get_rank() in planned else 0) <= buffers <= 2 * in_flight * bucket_bytes + rounding
    for value in source.values():  # a second run with new values uses the same program
        value.add_(1)
    transport.run(tensors(source), tensors(target))
    for key, value in expected.items():
        new = torch.where(value == UNWRITTEN, value, value + 1)
        assert torch.equal(target[key], new), f"case {number}, second run, rank {dist.get_rank()}: {key}"
    say(f"case {number} passed")


def refused_everywhere(case: tuple[ModelShape, TrainLayout, RolloutLayout]) -> None:
    """A parameter of rank 1 changes: every rank raises the same named error before a byte moves, and the next sync is right."""
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
        expect_error(ValueError, lambda wrong=wrong: transport.check_sources(tensors(wrong)), "rank 1", key, word)
    missing = {name: value for name, value in source.items() if name != key} if dist.get_rank() == 1 else source
    expect_error(ValueError, lambda: transport.check_sources(tensors(missing)), key, "not among")
    short = {name: value[:1] for name, value in target.items()}
    expect_error(ValueError, lambda: transport.check_destination("model.norm.weight", short["model.norm.weight"]), "rollout", "spans 1")
    transport.run(tensors(source), tensors(target))
    assert all(torch.equal(target[name], value) for name, value in expected.items())
    say("refused everywhere")


class Holder:
    """A training side: parameters by name, and their boxes."""

    def __init__(self, parameters: dict[str, torch.Tensor], groups: list[Boxes]) -> None:
        self.parameters, self.groups, self.settled = parameters, groups, 0

    def weight_boxes(self) -> list[Box]:
        return expand(self.groups)

    def settle(self) -> None:
        self.settled += 1

    def weight(self, key: str) -> torch.Tensor:
        return self.parameters[key]


class Taker(Holder):
    """A rollout side that counts what it is told."""

    def __init__(self, parameters: dict[str, torch.Tensor], groups: list[Boxes], replica: int) -> None:
        super().__init__(parameters, groups)
        self.replica, self.version, self.usable, self.written = replica, -1, True, 0

    def update_weights(self, transfer, version: int) -> None:
        self.usable, self.written = False, 0
        transfer(lambda key: self.weight(key), lambda key: self.count(key))
        self.usable, self.version = True, version
        self.finish()

    def finish(self) -> None:
        """What an engine does when all weights have come."""

    def count(self, key: str) -> None:
        self.written += 1


def whole_sync(case: tuple[ModelShape, TrainLayout, RolloutLayout], kind: Kind) -> None:
    """From boxes to a report; a changed source leaves the engine as it was; a byte changed on the wire is named and leaves it unusable."""
    model, train, rollout = case
    rank, full = dist.get_rank(), hf_tensors(model)
    policy = Holder(megatron_shards(full, model, train, rank), train_boxes(model, train, rank)) if rank < train.ranks else None
    engine = None
    if rank in rollout.ranks:
        blank = {key: torch.full_like(value, UNWRITTEN) for key, value in vllm_shards(full, model, rollout, rank).items()}
        engine = Taker(blank, rollout_boxes(model, rollout, rank), (rank - rollout.first_rank) // rollout.tp)
    sync = ReshardSync(policy, engine, gpus_per_node=2, bucket_mib=1, verify=True)
    sync._transport.kind = kind  # both run on a CPU
    report = sync.sync(version=3)
    assert report.version == 3 and sync.plan.ratio == 1.0
    if engine is not None:
        expected = vllm_shards(full, model, rollout, rank)
        assert all(torch.equal(engine.parameters[key], value) for key, value in expected.items())
        assert engine.version == 3 and engine.usable and engine.written > 0
        wanted = sum(value.numel() for value in expected.values()) - sum(int((value == UNWRITTEN).sum()) for value in expected.values())
        assert report.bytes_total == wanted * expected["model.norm.weight"].element_size()
    if rank == 0:
        kept = policy.parameters["0:embedding.word_embeddings.weight"]
        policy.parameters["0:embedding.word_embeddings.weight"] = kept.double()
    expect_error(ValueError, lambda: sync.sync(4), "rank 0", "0:embedding.word_embeddings.weight", "float64")
    assert engine is None or (engine.usable and engine.version == 3), "nothing moved, so the old weights serve on"
    if rank == 0:
        policy.parameters["0:embedding.word_embeddings.weight"] = kept
    no_room(sync)
    assert engine is None or (engine.usable and engine.version == 3)
    changed_on_the_wire(sync)
    assert engine is None or (not engine.usable and engine.version == 3)
    raised_in_the_middle(sync, policy, engine)
    if engine is not None:
        engine.usable = True
    sync.sync(7)
    assert engine is None or (engine.version == 7 and all(torch.equal(engine.parameters[key], value) for key, value in expected.items()))
    say("whole sync passed")


def no_room(sync: ReshardSync) -> None:
    """One rank has no memory for its buffers: every rank learns of it before anything moves."""
    transport, last = sync._transport, dist.get_world_size() - 1

    def full() -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no room")

    if dist.get_rank() == last:
        transport.buffers = full
    expect_error(WeightSyncError, lambda: sync.sync(4), f"rank {last}: OutOfMemoryError: no room")
    transport.__dict__.pop("buffers", None)
    assert transport.staging == []


def changed_on_the_wire(sync: ReshardSync) -> None:
    """The first byte of the first bucket of one rank: the slice it belongs to is named with both ranks."""
    packed, hit = transport_module._Run.packed, []
    sender = min(sync.plan.streams)[0]

    def tampered(run, message, buffer):
        packed(run, message, buffer)
        if message.stream[0] == sender and not hit:
            buffer[0] ^= 1
            chunk = message.chunks[0]
            hit.append(f"from rank {message.stream[0]} to rank {message.stream[1]}: {chunk.tensor}{slices(chunk.rect)}")

    transport_module._Run.packed = tampered
    everyone = [None] * dist.get_world_size()
    try:
        sync.sync(5)
    except WeightSyncError as error:
        dist.all_gather_object(everyone, hit)
        assert everyone[sender][0] in str(error), (everyone, str(error))
        assert "other bytes arrived than were sent" in str(error)
    else:
        raise AssertionError("changed bytes were accepted")
    finally:
        transport_module._Run.packed = packed


def raised_in_the_middle(sync: ReshardSync, policy: Holder | None, engine: Taker | None) -> None:
    """One rank raises, at every place where it can, and stays: all ranks raise one and the same error, at once, and go on together."""
    last = dist.get_world_size() - 1
    broken = OSError("the disk is gone")
    places = [(policy, "weight"), (policy, "settle"), (engine, "weight"), (engine, "count"), (engine, "update_weights"), (engine, "finish")]
    for side, name in places:
        mine = side is not None and dist.get_rank() == last
        everyone = [None] * (last + 1)
        dist.all_gather_object(everyone, mine)
        if not any(everyone):
            continue
        calls = []

        def fail(*args, side=side, name=name, calls=calls):
            calls.append(args)
            if len(calls) < (len(side.parameters) + 3 if name == "weight" and side is policy else 2 if name in ("weight", "count") else 1):
                return getattr(type(side), name)(side, *args)
            raise broken

        if mine:
            setattr(side, name, fail)
        before = None if engine is None else engine.version
        expect_error(WeightSyncError, lambda: sync.sync(6), f"rank {last}: OSError: the disk is gone")
        assert engine is None or engine.version == before or name == "finish", name
        if mine:
            delattr(side, name)


def peer_dies(case: tuple[ModelShape, TrainLayout, RolloutLayout]) -> None:
    """The last rank dies inside a sync: each survivor that talks to it raises an error with ranks and tensors."""
    _, transport, source, _, target = prepare(case, 208, 2)
    if dist.get_rank() == dist.get_world_size() - 1:
        served = []

        def die(key: str) -> torch.Tensor:
            served.append(key)
            if len(served) > 8:
                os._exit(0)
            return source[key]

        transport.run(die, tensors(target))
    expect_error(WeightSyncError, lambda: transport.run(tensors(source), tensors(target)), "round", "rank", "model.", "half updated")
    print("survivor raised", flush=True)
    os._exit(0)  # the group is broken


def expect_error(kind: type[Exception], call, *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def say(text: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    cases = CASES[dist.get_world_size()]
    for number, case in enumerate(cases):
        run_case(number, case)
    refused_everywhere(cases[0])
    for case, kind in zip((cases[0], *cases[4:6]), ("hash", "sums", "sums"), strict=True):
        whole_sync(case, kind)
    if "die" in sys.argv:
        peer_dies(cases[0])
    dist.destroy_process_group()
