"""Faults of a planned sync between plain parameters: of one rank, raised on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.errors import WeightSyncError
from megatron_rl.types import Shard
from megatron_rl.weight_sync import transport as transport_module
from megatron_rl.weight_sync.planner.shards import ShardGroup
from megatron_rl.weight_sync.planner.slices import slice_text
from megatron_rl.weight_sync.reshard import ReshardSync
from tools.planning.shard_table import expand

Tensors = dict[str, torch.Tensor]


def expect_error(kind: type[Exception], call, *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


class Source:
    """A training side: parameters by name, and their shards."""

    def __init__(self, parameters: Tensors, groups: list[ShardGroup]) -> None:
        self.parameters = parameters
        self.groups = groups

    def weight_shards(self) -> list[Shard]:
        return expand(self.groups)

    def wait_for_param_gather(self) -> None: ...

    def weight(self, key: str) -> torch.Tensor:
        return self.parameters[key]


class Sink(Source):
    """A rollout side that counts what it is told."""

    def __init__(self, parameters: Tensors, groups: list[ShardGroup], replica: int) -> None:
        super().__init__(parameters, groups)
        self.replica = replica
        self.version = -1
        self.usable = True
        self.written = 0

    def update_weights(self, transfer, version: int) -> None:
        self.usable = False
        self.written = 0
        transfer(lambda key: self.weight(key), lambda key: self.count(key))
        self.usable = True
        self.version = version
        self.finish()

    def finish(self) -> None:
        """What an engine does when all weights have come."""

    def count(self, key: str) -> None:
        self.written += 1


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
    """The first byte of the first bucket of one rank: the slice it belongs to is named with both
    ranks."""
    packed, hit = transport_module._TransportRun.packed, []
    sender = int(sync.plan.flows.edges.sender.min())

    def tampered(run, message, buffer):
        packed(run, message, buffer)
        if message.stream.source == sender and not hit:
            buffer[0] ^= 1
            chunk = message.chunks[0]
            hit.append(
                f"from rank {message.stream.source} to rank {message.stream.target}:"
                f" {chunk.tensor}{slice_text(chunk.region)}"
            )

    transport_module._TransportRun.packed = tampered
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
        transport_module._TransportRun.packed = packed


def raised_in_the_middle(sync: ReshardSync, source: Source | None, sink: Sink | None) -> None:
    """One rank raises, at every place where it can, and stays: all ranks raise one and the same
    error, at once, and go on together."""
    last = dist.get_world_size() - 1
    # (side, method, calls of it that pass: all sources are looked at before anything moves)
    places = [
        (source, "weight", 2 + len(source.parameters) if source is not None else 0),
        (source, "wait_for_param_gather", 0),
        (sink, "weight", 1),
        (sink, "count", 1),
        (sink, "update_weights", 0),
        (sink, "finish", 0),
    ]
    for side, name, passing in places:
        fails_here = side is not None and dist.get_rank() == last
        everyone = [None] * (last + 1)
        dist.all_gather_object(everyone, fails_here)
        if not any(everyone):
            continue
        calls = []

        def fail(*args, side=side, name=name, passing=passing, calls=calls):
            calls.append(args)
            if len(calls) <= passing:
                return getattr(type(side), name)(side, *args)
            raise OSError("the disk is gone")

        if fails_here:
            setattr(side, name, fail)
        before = None if sink is None else sink.version
        expect_error(
            WeightSyncError, lambda: sync.sync(6), f"rank {last}: OSError: the disk is gone"
        )
        assert sink is None or sink.version == before or name == "finish", name
        if fails_here:
            delattr(side, name)
