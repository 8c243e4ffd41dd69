"""Weights for several servers whose workers are processes of their own, on nodes of their own, over
real gloo: they pass on what all of them want, and one that dies costs only itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from multiprocessing.connection import Client, Listener
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.runtime.joint_group import Barrier, connect_store, join_group, leave_group
from megatron_rl.runtime.launch import World
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.fleet.fleet import FleetReport, FleetSync
from megatron_rl.weight_sync.reshard import ReshardSync
from tests.distributed.test_nodes import MODEL, R, T
from tests.distributed.transport_faults import Sink, Source
from tests.ranks import on_ranks
from tests.unit.weight_sync.slow_layouts import UNWRITTEN, hf_tensors, megatron_shards, vllm_shards
from tests.unit.weight_sync.training_tables import train_shards
from tools.planning.engine_tables import rollout_shards

TRAINERS = 2
TRAIN = T(tp=TRAINERS)
SECRET = "of the run"
# Longer than a test may take: nobody is to be noticed missing by the limit alone.
OPTIONS = TransferOptions(bucket_mib=1, timeout_s=3600.0)


class Connected:
    """Commands to a server: to the processes of its workers. Rank 0 has one for each server."""

    def __init__(self, addresses: list[Any]) -> None:
        self.addresses = addresses

    def address(self) -> str:
        return "127.0.0.1"

    def num_workers(self) -> int:
        return len(self.addresses)

    def __getattr__(self, name: str) -> Any:
        def command(argument: Any = None) -> None:
            connections = []
            try:
                for address in self.addresses:  # to all workers before any of them has answered
                    connections.append(Client(address))
                    connections[-1].send((name, argument))
                for connection in connections:
                    connection.recv()
            except (EOFError, OSError) as error:
                raise ConnectionError(f"{name}: a worker is gone: {error!r}") from error

        return command


class Worker:
    """A worker of a server: follows the commands as the backend of vLLM does."""

    def __init__(self, layout: R) -> None:
        self.layout = layout
        self.full = hf_tensors(MODEL)
        cut = self.cut()
        blank = {key: torch.full_like(value, UNWRITTEN) for key, value in cut.items()}
        self.sink = Sink(blank, rollout_shards(MODEL, layout, dist.get_rank()), 0)
        self.group: dist.ProcessGroup | None = None
        self.heard: list[str] = []
        self.listener = Listener(("127.0.0.1", 0))

    def cut(self) -> dict[str, torch.Tensor]:
        return vllm_shards(self.full, MODEL, self.layout, dist.get_rank())

    def serve(self) -> None:
        """Until it is told to end."""
        name = ""
        while name != "end":
            with self.listener.accept() as connection:
                name, argument = connection.recv()
                self.heard.append(name)
                getattr(self, name, lambda _: None)(argument)
                connection.send("done")

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        self.leave()
        first = info["first_rank"]
        self.rank = first + (dist.get_rank() - self.layout.first_rank) % self.layout.tp
        self.sink.replica = first
        store = connect_store(info["address"], info["port"], OPTIONS.timeout_s)
        self.barrier = Barrier(store, SECRET)
        self.barrier.wait("init", self.rank)
        options = TransferOptions(**info["options"])
        self.group = join_group(store, self.rank, info["size"], options.timeout_s, SECRET)
        self.sync = ReshardSync(None, self.sink, options, gpus_per_node=None, group=self.group)
        self.barrier.report("init", self.rank, "")

    def update(self, info: Mapping[str, Any]) -> None:
        self.barrier.wait(info["step"], self.rank)
        problem = ""
        try:
            self.sync.sync(info["version"])
        except RuntimeError as error:
            problem = str(error)
            self.leave(error)
        self.barrier.report(info["step"], self.rank, problem)

    def leave(self, error: Exception | None = None) -> None:
        self.sync = None
        if self.group is not None:
            leave_group(self.group, error)
            self.group = None

    def finish(self, version: int) -> None:
        """Each version of the policy is the one before with 1 added."""
        for key, value in self.cut().items():
            want = value.clone()
            for _ in range(version):
                want += value != UNWRITTEN
            assert torch.equal(self.sink.parameters[key], want), f"rank {dist.get_rank()} {key}"

    def die_in_the_middle(self, _: None) -> None:
        self.sink.count = lambda key: os._exit(0)  # with the first parameter


class TrainingSide:
    """The trainer's end, and what it has pushed so far."""

    def __init__(self, addresses: Mapping[str, list[Any]], control: Any) -> None:
        rank = dist.get_rank()
        self.world = World(rank, TRAINERS, rank, "launch", control)
        self.servers = {name: Connected(at) for name, at in addresses.items()}
        parameters = megatron_shards(hf_tensors(MODEL), MODEL, TRAIN, rank)
        self.source = Source(parameters, train_shards(MODEL, TRAIN, rank))
        self.fleet = FleetSync(
            self.source, self.world, SECRET, OPTIONS, "keep", "cpu", make_server=self.servers.get
        )
        self.version = 0

    def push(self, names: str) -> tuple[FleetReport, int]:
        """The next version; with the bytes that leave the trainer's ranks."""
        self.version += 1
        for value in self.source.parameters.values():
            value.add_(1)
        report = self.fleet.sync(self.version, {name: name for name in names})
        return report, sum(self.world.all_gather(report.sync.bytes_sent))

    def tell(self, name: str, command: str) -> None:
        if self.world.is_main:
            getattr(self.servers[name], command)()


def started(tp: int, nodes: str) -> TrainingSide | Worker:
    """This rank's part: servers a, b, c of ``tp`` workers each, on these nodes. Only trainers
    return at once, workers when they are told to end."""
    layout = R(tp=tp, dp=len(nodes), first_rank=TRAINERS)
    rank = dist.get_rank()
    control = dist.new_group(list(range(TRAINERS)), backend="gloo")
    platform.node = lambda: "trainer"
    worker = None
    if rank >= TRAINERS:
        platform.node = lambda: nodes[(rank - TRAINERS) // tp]
        worker = Worker(layout)
    addresses = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, None if worker is None else worker.listener.address)
    if worker is not None:
        worker.serve()
        return worker
    served = addresses[TRAINERS:]
    return TrainingSide(
        {name: served[i * tp : (i + 1) * tp] for i, name in enumerate("abc"[: len(nodes)])}, control
    )


def leave_the_trainer(tp: int, nodes: str, copies: int) -> None:
    part = started(tp, nodes)
    if isinstance(part, Worker):
        assert part.heard.count("finish") == (3 if dist.get_rank() < TRAINERS + tp else 2)
        return
    alone, left_alone = part.push("a")
    assert alone.updated == ("a",) and left_alone <= alone.sync.bytes_total
    for _ in range(2):
        report, left = part.push("abc")
        assert report.updated == ("a", "b", "c") and not report.lost
        assert left == copies * left_alone
        assert report.sync.bytes_total == 3 * alone.sync.bytes_total
    for name in "abc":
        part.tell(name, "end")


@pytest.mark.parametrize(
    ("nodes", "copies"), [pytest.param("xyy", 2, marks=pytest.mark.full), ("yyy", 1)]
)
@on_ranks(TRAINERS + 3)
def test_each_byte_leaves_the_trainer_once_for_each_node(nodes: str, copies: int) -> None:
    leave_the_trainer(1, nodes, copies)


@on_ranks(TRAINERS + 6)
def test_each_byte_leaves_the_trainer_once_for_a_chain_of_nodes() -> None:
    """Two ranks cannot feed more than one node of two ranks at its full rate."""
    leave_the_trainer(2, "xyz", 1)


@pytest.mark.parametrize(
    "dies", ["b", *(pytest.param(name, marks=pytest.mark.full) for name in "ac")]
)
@on_ranks(TRAINERS + 3)
def test_a_server_that_dies_in_the_middle_costs_itself_alone(dies: str) -> None:
    """The others pass on its bytes, or wait for them."""
    part = started(1, "yyy")
    if isinstance(part, Worker):
        assert part.heard[-4:-1] == ["update", "finish", "resume"]
        return
    part.push("abc")
    part.tell(dies, "die_in_the_middle")
    left = tuple(name for name in "abc" if name != dies)
    report, _ = part.push("abc")
    assert report.updated == left and set(report.lost) == {dies}
    assert "a worker is gone" in report.lost[dies]
    report, _ = part.push("".join(left))
    assert report.updated == left and not report.lost
    for name in left:
        part.tell(name, "end")
