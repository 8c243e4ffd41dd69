"""The trainer's end of a sync to a server: its commands in order, what it does when something
fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime.joint_group import Barrier, connect_store, join_group
from megatron_rl.types import Shard, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer
from megatron_rl.weight_sync.fleet.controller import ServersError
from megatron_rl.weight_sync.reshard import ReshardSync
from tests.pushes import OneServer

OPTIONS = TransferOptions(timeout_s=20.0)


def shard(name, rows, start=0):
    return Shard(name, (4, 2), (start, 0), (rows, 2), 0, (2, 1), key=name, dtype="float32")


class Policy:
    def __init__(self):
        self.values = {"a": torch.arange(8.0).view(4, 2), "b": torch.arange(8.0, 16.0).view(4, 2)}

    def weight_shards(self):
        return [shard(name, 4) for name in self.values]

    def wait_for_param_gather(self): ...

    def weight(self, key):
        return self.values[key]


class Worker:
    """One of two workers, with half of the rows; together they are one replica."""

    def __init__(self, number):
        self.replica, self.number = 0, number
        self.values = {name: torch.zeros(2, 2) for name in ("a", "b")}
        self.staged = {name: torch.zeros(2, 2) for name in ("a", "b")}
        self.is_staging = False

    def weight_shards(self):
        return [shard(name, 2, start=2 * self.number) for name in self.values]

    def update_weights(self, transfer, version):
        values = self.staged if self.is_staging else self.values
        transfer(values.__getitem__, lambda key: None)


class TwoWorkers:
    """A server of two workers, in threads: follows the commands as the backend does, and notes
    them."""

    def __init__(self, secret=""):
        self.secret = secret
        self.commands, self.problem = [], ""
        self.workers = [Worker(0), Worker(1)]
        self.pool = ThreadPoolExecutor(2)

    def address(self):
        return "127.0.0.1"

    def num_workers(self):
        return 2

    def pause(self, in_flight):
        self.commands.append(f"pause {in_flight}")

    def resume(self):
        self.commands.append("resume")

    def cancel(self):
        self.commands.append("cancel")

    def finish(self, version):
        self.commands.append(f"finish {version}")

    def init_transfer(self, info):
        self.info = info
        self.each("init", self.join)

    def update(self, info):
        self.commands.append(f"update {info['version']}")
        self.each(info["step"], lambda number: self.syncs[number].sync(info["version"]))

    def stage(self, info):
        self.commands.append(f"stage {info['version']}")
        for worker in self.workers:
            worker.is_staging = True
        action = (info["step"], lambda number: self.syncs[number].sync(info["version"]))
        threading.Thread(target=self.each, args=action).start()

    def switch(self, version):
        self.commands.append(f"switch {version}")
        for worker in self.workers:
            worker.values = dict(worker.staged)

    def alive(self): ...

    def each(self, step, action):
        self.syncs = self.syncs if step != "init" else {}
        list(self.pool.map(lambda number: self.one(step, number, action), (0, 1)))

    def one(self, step, number, action):
        rank = self.info["first_rank"] + number
        barrier = Barrier(connect_store("127.0.0.1", self.info["port"], 20), self.secret)
        problem = ""
        try:
            barrier.wait(step, rank, self.problem if number == 1 else "")
            action(number)
        except (ValueError, RuntimeError) as error:
            problem = str(error)
        barrier.report(step, rank, problem)

    def join(self, number):
        store = connect_store("127.0.0.1", self.info["port"], 20)
        rank = self.info["first_rank"] + number
        self.workers[number].replica = self.info["first_rank"]
        group = join_group(store, rank, self.info["size"], 20, self.secret)
        options = TransferOptions(**self.info["options"])
        self.syncs[number] = ReshardSync(
            None, self.workers[number], options, gpus_per_node=1, group=group
        )


def served(server):
    return {
        name: torch.cat([worker.values[name] for worker in server.workers]) for name in ("a", "b")
    }


def test_a_sync_brings_the_weights_between_pause_and_resume(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS)
    for version in (1, 2):
        policy.values["a"] += version
        report = sync.sync(version)
        assert all(
            torch.equal(value, policy.values[name]) for name, value in served(server).items()
        )
    assert server.commands[4:] == ["pause wait", "update 2", "finish 2", "resume"]
    assert (report.version, report.num_tensors, report.bytes_sent, report.bytes_total) == (
        2,
        2,
        64,
        64,
    ) and sync.plan.lower_bound == 64
    sync.close()


def test_a_changed_weight_leaves_the_server_serving(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS, in_flight="keep")
    sync.sync(1)
    good, policy.values["b"] = policy.values["b"], policy.values["b"].double()
    with pytest.raises(ValueError, match=r"'b'.*float64"):
        sync.sync(2)
    assert server.commands[4:] == ["pause keep", "update 2", "cancel", "resume"]
    policy.values["b"] = good
    sync.sync(3)
    assert server.commands[-2:] == ["finish 3", "resume"]
    sync.close()


def test_a_worker_with_a_problem_stops_the_update_before_it_begins(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS)
    sync.sync(1)
    before, server.problem = served(server), "its weights are half replaced"
    policy.values["a"] += 1
    with pytest.raises(
        WeightSyncError,
        match=r"version 2 did not begin: rank 2: its weights are half replaced",
    ):
        sync.sync(2)
    assert server.commands[4:] == ["pause wait", "update 2"]
    assert all(torch.equal(value, before[name]) for name, value in served(server).items())
    sync.close()
    sync.close()


def test_a_worker_that_fails_in_the_middle_leaves_the_server_paused(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, replace(OPTIONS, verify=False))

    def fail(transfer, version):
        transfer(server.workers[1].values.__getitem__, lambda key: None)
        raise RuntimeError("no memory is left")

    server.workers[1].update_weights = fail
    with pytest.raises(WeightSyncError, match="rank 2: RuntimeError: no memory"):
        sync.sync(1)
    assert server.commands == ["pause wait", "update 1"]


def test_a_rank_that_is_not_ready_leaves_the_server_serving(world):
    policy, server, waits = Policy(), TwoWorkers(), []
    sync = OneServer(policy, server, world, OPTIONS)

    def wait():
        waits.append("once")
        if len(waits) == 1:
            raise OSError("the disk is gone")

    policy.wait_for_param_gather = wait
    with pytest.raises(WeightSyncError, match=r"rank 0: OSError: the disk is gone$"):
        sync.sync(1)
    assert (
        server.commands == ["pause wait", "update 1", "cancel", "resume"]
        and not served(server)["a"].any()
    )
    sync.sync(2)
    assert torch.equal(served(server)["a"], policy.values["a"]) and len(waits) == 2
    sync.close()


def test_a_refused_update_that_cannot_be_called_off_says_so(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS)
    policy.values["b"] = policy.values["b"].double()
    server.cancel = failing("the engine is dead")
    words = r"version 1 did not begin: .*float64.*; calling it off: the engine is dead$"
    with pytest.raises(WeightSyncError, match=words):
        sync.sync(1)
    sync.close()


def failing(text):
    def fail(*_):
        raise ConnectionError(text)

    return fail


def test_a_server_that_does_not_pause_or_resume(world):
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS)
    server.pause = failing("pause: timed out")
    with pytest.raises(
        WeightSyncError, match=r"version 1 did not begin, nothing has moved: pause: timed out$"
    ):
        sync.sync(1)
    assert server.commands == ["resume"]
    server.resume = failing("resume: timed out")
    with pytest.raises(
        WeightSyncError, match="pause: timed out; the server may be paused: resume: timed out"
    ):
        sync.sync(1)
    del server.pause
    with pytest.raises(
        WeightSyncError,
        match=(r"version 2 is complete, but the server did not resume: resume: timed out"),
    ):
        sync.sync(2)
    assert (
        torch.equal(served(server)["a"], policy.values["a"]) and server.commands[-1] == "finish 2"
    )
    sync.close()


def test_the_server_learns_the_kind_of_device(world):
    server = TwoWorkers()
    OneServer(Policy(), server, world, OPTIONS).close()
    assert server.info["device"] == "cpu"
    server = TwoWorkers()
    server.problem = "devices differ"
    with pytest.raises(ServersError, match="devices differ"):
        OneServer(Policy(), server, world, OPTIONS, device="cuda:0")
    assert server.info["device"] == "cuda"


def test_misfits_and_absences_are_one_error(world):
    policy, server = Policy(), TwoWorkers()
    policy.values["c"] = torch.zeros(4, 2)
    with pytest.raises(
        ValueError, match=r"c\[0:4, 0:2\].*needed by none of the rollout ranks \[1, 2\]"
    ):
        OneServer(policy, server, world, OPTIONS)
    server = TwoWorkers()
    server.problem = "no checkpoint"
    with pytest.raises(ServersError, match="rank 2: no checkpoint"):
        OneServer(Policy(), server, world, OPTIONS)
    server = TwoWorkers()
    server.init_transfer = lambda info: None
    with pytest.raises(ServersError, match="answered before its workers came"):
        OneServer(Policy(), server, world, OPTIONS)
    for url, words in {
        "http://127.0.0.1:1": "no server is reached.*is it up",
        "127.0.0.1:1": "begins with http:// or https://",
    }.items():
        with pytest.raises(ServersError, match=f"{url}: .*{words}"):
            OneServer(Policy(), HttpServer(url), world, OPTIONS)
    server = TwoWorkers()
    server.address = lambda: "203.0.113.1"  # of no machine: the store cannot be served there
    with pytest.raises(RuntimeError):
        OneServer(Policy(), server, world, TransferOptions(timeout_s=0.2))


def test_a_refused_construction_leaves_nothing_behind(world):
    before, server = set(distributed_c10d._world.pg_map), TwoWorkers()
    policy = Policy()
    policy.values["c"] = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="needed by none"):
        OneServer(policy, server, world, OPTIONS)
    ours = set(distributed_c10d._world.pg_map) - before
    assert len(ours) == 2, "the two workers' alone"
    with pytest.raises(dist.DistError):
        connect_store("127.0.0.1", server.info["port"], 1)
