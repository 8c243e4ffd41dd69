"""Several servers that come, fail and go: each has the version of the others, or is named as
lost."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from megatron_rl.runtime.joint_group import Barrier, connect_store
from megatron_rl.weight_sync.fleet import controller
from megatron_rl.weight_sync.fleet.commands import switch_weights
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory
from tests.unit.weight_sync.test_server import (
    OPTIONS,
    Policy,
    TwoWorkers,
    Worker,
    failing,
    served,
)


@pytest.fixture
def servers():
    return {f"at {name}": TwoWorkers() for name in "abc"}


@pytest.fixture
def fleet(world, servers):
    return FleetSync(Policy(), world, "", OPTIONS, "keep", "cpu", make_server=servers.get)


class Clock:
    """The trainer's, as it waits for servers."""

    ahead_s = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(controller, "time", Clock())
    return controller.time


def named(servers, names):
    return {name: f"at {name}" for name in names}


def test_all_get_the_weights_from_one_plan(fleet, servers):
    report = fleet.sync(1, named(servers, "ab"))
    assert report.updated == ("a", "b") and not report.lost
    assert report.sync.bytes_total == 2 * 64 and report.sync.num_tensors == 2
    fleet.source.values["a"] += 1
    report = fleet.sync(2, named(servers, "abc"))
    assert report.updated == ("a", "b", "c")
    for server in servers.values():
        assert torch.equal(served(server)["a"], fleet.source.values["a"])
    assert servers["at c"].commands == ["pause keep", "update 2", "finish 2", "resume"]


def test_the_store_does_not_grow_with_the_run(fleet, servers):
    sizes = []
    for version in range(1, 7):
        assert fleet.sync(version, named(servers, "ab")).updated == ("a", "b")
        (group,) = fleet._groups.values()
        sizes.append(group._controller._store.num_keys())
    assert sizes[2:] == sizes[2:3] * 4


def test_one_that_fails_is_named_and_the_others_have_the_version(fleet, servers):
    fleet.sync(1, named(servers, "abc"))
    servers["at b"].pause = failing("the connection was reset")
    servers["at c"].problem = "its weights are half replaced"
    fleet.source.values["b"] += 1
    report = fleet.sync(2, named(servers, "abc"))
    assert report.updated == ("a",) and set(report.lost) == {"b", "c"}
    assert "the connection was reset" in report.lost["b"]
    assert "half replaced" in report.lost["c"]
    assert torch.equal(served(servers["at a"])["b"], fleet.source.values["b"])


def test_one_that_was_lost_and_starts_anew_is_connected_again(fleet, servers):
    servers["at a"].pause = failing("timed out")
    assert set(fleet.sync(1, named(servers, "a")).lost) == {"a"}
    servers["at a"] = TwoWorkers()
    assert fleet.sync(1, named(servers, "a")).updated == ("a",)


def test_one_that_is_not_kept_is_forgotten(fleet, servers):
    fleet.sync(1, named(servers, "ab"))
    fleet.keep({"a"})
    servers["at b"] = TwoWorkers()  # at the same address
    assert fleet.sync(2, named(servers, "ab")).updated == ("a", "b")
    assert len(servers["at b"].commands) == 4


def test_a_server_that_is_not_there_or_holds_another_model_is_lost(fleet, servers):
    servers["at a"].problem = "the server was started with another model"
    servers["at b"].address = failing("no server is reached")
    report = fleet.sync(1, named(servers, "abc"))
    assert report.updated == ("c",)
    assert "another model" in report.lost["a"] and "no server is reached" in report.lost["b"]


def test_one_whose_fault_is_nobodys_knowledge_is_found(fleet, servers):
    """It raises in the middle, and all others with it: the text alone says who."""
    fleet.sync(1, named(servers, "abc"))

    def fail(transfer, version):
        transfer(servers["at b"].workers[0].values.__getitem__, lambda key: None)
        raise RuntimeError("no memory is left")

    servers["at b"].workers[0].update_weights = fail
    fleet.source.values["b"] += 1
    report = fleet.sync(2, named(servers, "abc"))
    assert report.updated == ("a", "c") and "no memory is left" in report.lost["b"]
    for name in "ac":
        assert torch.equal(served(servers[f"at {name}"])["b"], fleet.source.values["b"])
    assert servers["at a"].commands[4:-4] == ["pause keep", "update 2", "cancel"]
    assert servers["at a"].commands[-4:] == ["pause keep", "update 2", "finish 2", "resume"]


def test_one_that_does_not_go_on_costs_no_second_push(fleet, servers):
    servers["at b"].resume = failing("resume: timed out")
    report = fleet.sync(1, named(servers, "abc"))
    assert report.updated == ("a", "c")
    assert "is complete, but the server did not resume: resume: timed out" in report.lost["b"]
    assert servers["at a"].commands == ["pause keep", "update 1", "finish 1", "resume"]
    assert fleet.sync(2, named(servers, "ac")).updated == ("a", "c")


def test_one_that_falls_silent_is_not_waited_for(fleet, servers, clock):
    fleet.sync(1, named(servers, "ab"))
    answer = threading.Event()

    def silent(info):
        barrier = Barrier(connect_store("127.0.0.1", servers["at b"].info["port"], 20))
        first = servers["at a"].info["first_rank"]
        while not all(barrier.has_arrived(info["step"], first + number) for number in (0, 1)):
            time.sleep(0.01)
        clock.ahead_s = 1000.0
        answer.wait(60)

    servers["at b"].update = silent
    try:
        report = fleet.sync(2, named(servers, "ab"))
        assert report.updated == ("a",)
        assert "its workers did not come within 10 s" in report.lost["b"]
    finally:
        answer.set()


class Halves(Worker):
    """One that wants another type."""

    def __init__(self, number):
        super().__init__(number)
        self.values = {name: value.bfloat16() for name, value in self.values.items()}

    def weight_shards(self):
        return [replace(shard, dtype="bfloat16") for shard in super().weight_shards()]


def test_those_that_do_not_fit_each_other_have_groups_of_their_own(world, servers):
    options = replace(OPTIONS, cast=True)
    fleet = FleetSync(Policy(), world, "", options, "keep", "cpu", make_server=servers.get)
    servers["at b"].workers = [Halves(0), Halves(1)]
    for version in (1, 2):
        report = fleet.sync(version, named(servers, "ab"))
        assert report.updated == ("a", "b") and not report.lost
        assert torch.equal(served(servers["at b"])["a"], fleet.source.values["a"].bfloat16())


def test_without_servers_nothing_moves(fleet):
    report = fleet.sync(3, {})
    assert report.updated == () and report.sync.bytes_total == 0 and report.sync.version == 3


def test_staged_weights_wait_beside_the_old_ones(fleet, servers):
    """A server hears of nothing that would stop it, until it is told to go over."""
    report = fleet.sync(1, named(servers, "ab"), staged=True)
    assert report.updated == ("a", "b") and not report.lost
    for name in "ab":
        server = servers[f"at {name}"]
        assert server.commands == ["stage 1"]
        assert not served(server)["a"].any()
        switch_weights(server, 1, "keep")
        assert server.commands[1:] == ["pause keep", "switch 1", "finish 1", "resume"]
        assert torch.equal(served(server)["a"], fleet.source.values["a"])


def test_one_that_ends_while_it_stages_costs_itself_alone(fleet, servers, monkeypatch):
    monkeypatch.setattr(controller, "_LOOK_EVERY_S", 0.0)
    fleet.sync(1, named(servers, "abc"), staged=True)
    servers["at b"].stage = lambda info: None  # nobody comes of it
    servers["at b"].alive = once_then_gone()
    report = fleet.sync(2, named(servers, "abc"), staged=True)
    assert report.updated == ("a", "c") and "gone" in report.lost["b"]
    for name in "ac":
        assert servers[f"at {name}"].commands[-1] == "stage 2"


def test_one_that_never_says_how_it_ended_is_not_waited_for(fleet, servers, clock):
    """Its workers have their weights, and lose the connection to the trainer; it is well."""
    fleet.sync(1, named(servers, "ab"), staged=True)

    def silent(step, number, action):
        barrier = Barrier(connect_store("127.0.0.1", servers["at b"].info["port"], 20))
        barrier.wait(step, servers["at b"].info["first_rank"] + number)
        action(number)
        first = servers["at a"].info["first_rank"]
        while not barrier.has_reported(step, [first, first + 1]):
            time.sleep(0.01)
        clock.ahead_s = 1000.0

    servers["at b"].one = silent
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(fleet.sync, 2, named(servers, "ab"), staged=True)
        try:
            report = pushed.result(timeout=60.0)
        finally:
            for number in (0, 1):  # nobody waits for it where the test fails
                rank = servers["at b"].info["first_rank"] + number
                with contextlib.suppress(RuntimeError):
                    store = connect_store("127.0.0.1", servers["at b"].info["port"], 1)
                    Barrier(store).report("sync2", rank, "")
    assert report.updated == ("a",)
    assert "its workers have not reported within 20 s how it ended" in report.lost["b"]


def once_then_gone():
    answers = iter([None])

    def alive():
        if next(answers, "gone") == "gone":
            raise ConnectionError("it is gone")

    return alive


def test_weights_that_cannot_be_staged_leave_the_old_ones_in_use(fleet, servers):
    fleet.sync(1, named(servers, "ab"))
    before = served(servers["at a"])["b"].clone()

    def fail(transfer, version):
        raise RuntimeError("no memory is left")

    servers["at b"].workers[0].update_weights = fail
    fleet.source.values["b"] += 1
    report = fleet.sync(2, named(servers, "ab"), staged=True)
    assert report.updated == ("a",) and "no memory is left" in report.lost["b"]
    assert torch.equal(served(servers["at a"])["b"], before)
    assert servers["at a"].commands[4:] == ["stage 2", "stage 2"], "never paused"
    switch_weights(servers["at a"], 2, "keep")
    assert torch.equal(served(servers["at a"])["b"], before + 1)


def test_held_weights_are_those_of_the_last_two_holds(world, servers):
    policy = Policy()
    held = WeightHistory(policy)
    fleet = FleetSync(held, world, "", OPTIONS, "wait", "cpu", make_server=servers.get)
    held.hold(1)
    before = policy.values["a"].clone()
    policy.values["a"] += 1
    fleet.sync(1, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before)
    held.hold(2)
    fleet.sync(2, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before + 1)
    held.use(1)
    fleet.sync(1, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before)
    policy.values["a"] += 1
    held.hold(3)
    fleet.sync(3, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before + 2)
    with pytest.raises(AssertionError, match=r"version 1 is not held, but \[2, 3\]"):
        held.use(1)
