"""What travels between trainer and workers is plain data, and who does not know the secret of the
run is not let in."""

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron_rl.weight_sync.fleet.controller import ServersError
from tests.pushes import OneServer
from tests.unit.weight_sync.test_server import OPTIONS, Policy, TwoWorkers, served


def test_nothing_between_trainer_and_workers_is_a_pickle(world, monkeypatch):
    """Neither the plan nor what goes wrong: both ends would run what it holds."""

    def pickled(*_):
        raise AssertionError("an object travels as a pickle")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(distributed_c10d, name, pickled)
    policy, server = Policy(), TwoWorkers()
    sync = OneServer(policy, server, world, OPTIONS)
    sync.sync(1)
    assert torch.equal(served(server)["a"], policy.values["a"])
    policy.values["b"] = policy.values["b"].double()
    with pytest.raises(ValueError, match=r"'b'.*float64"):
        sync.sync(2)
    sync.close()


def test_a_worker_without_the_secret_is_not_let_in(world):
    policy, server = Policy(), TwoWorkers(secret="of the run")
    sync = OneServer(policy, server, world, OPTIONS, secret="of the run")
    sync.sync(1)
    assert torch.equal(served(server)["b"], policy.values["b"])
    sync.close()
    for own, theirs in (("of the run", "guessed"), ("of the run", ""), ("", "of another run")):
        with pytest.raises(
            ServersError, match="rank 1, 2: it does not know the secret of this run"
        ):
            OneServer(policy, TwoWorkers(theirs), world, OPTIONS, secret=own)
