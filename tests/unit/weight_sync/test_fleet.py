"""Several servers that come, fail and go: each has the version of the others, or is named as
lost."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.weight_sync.fleet import FleetSync
from megatron_rl.weight_sync.held import HeldWeights
from tests.unit.weight_sync.test_server import (
    OPTIONS,
    WORLD,
    Policy,
    TwoWorkers,
    failing,
    served,
)


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield WORLD
    dist.destroy_process_group()


@pytest.fixture
def servers():
    return {f"at {name}": TwoWorkers() for name in "abc"}


@pytest.fixture
def fleet(world, servers):
    return FleetSync(Policy(), world, "", OPTIONS, "keep", "cpu", make_server=servers.get)


def named(servers, names):
    return {name: f"at {name}" for name in names}


def test_all_get_the_weights_from_one_plan(fleet, servers):
    report = fleet.sync(1, named(servers, "ab"))
    assert report.updated == ("a", "b") and not report.lost
    assert report.sync.bytes_total == 2 * 64 and report.sync.num_tensors == 2
    assert len(fleet.plans) == 1
    fleet.source.values["a"] += 1
    report = fleet.sync(2, named(servers, "abc"))
    assert report.updated == ("a", "b", "c")
    for server in servers.values():
        assert torch.equal(served(server)["a"], fleet.source.values["a"])
    assert servers["at c"].commands == ["pause keep", "update 2", "finish 2", "resume"]


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


def test_without_servers_nothing_moves(fleet):
    report = fleet.sync(3, {})
    assert report.updated == () and report.sync.bytes_total == 0 and report.sync.version == 3


def test_held_weights_are_those_of_the_last_hold(world, servers):
    policy = Policy()
    held = HeldWeights(policy)
    fleet = FleetSync(held, world, "", OPTIONS, "wait", "cpu", make_server=servers.get)
    held.hold()
    before = policy.values["a"].clone()
    policy.values["a"] += 1
    fleet.sync(1, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before)
    held.hold()
    fleet.sync(2, named(servers, "a"))
    assert torch.equal(served(servers["at a"])["a"], before + 1)
