"""The start of a launch on CUDA: a torch that is too old is refused before anything is done."""

from __future__ import annotations

import re
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rl.runtime import launch
from tests.launch import run

OLD = "2.10.0a0+b558c986e8.nv25.11"
# A torch that answers as one with CUDA; its true version is far newer.
PROGRAM = f"""
import torch
torch.cuda.is_available = lambda: True
torch.__version__ = "{OLD}"
from megatron_rl.train import main
main(["experiment=quickstart_cpu", "run_dir=" + __import__("sys").argv[1]])
"""


@pytest.mark.parametrize("version", [OLD, "2.9.1+cu130", "2.0.0", "1.13.1"])
def test_an_old_torch_is_refused_before_any_work(monkeypatch, version):
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "set_device", touched)
    monkeypatch.setattr(launch, "prepare", touched)
    monkeypatch.setattr(dist, "init_process_group", touched)
    with pytest.raises(
        ValueError, match=rf"torch {re.escape(version)} .* torch 2\.11 or newer .* extra `gpu`"
    ):
        launch.start()


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0a0+eb65b36914.nv26.02", "2.13.0+cu130", "3.0.0"]
)
def test_a_torch_that_can_is_not_refused(version):
    launch.refuse_old_torch(version)


def test_without_cuda_the_launch_goes_on(monkeypatch):
    """What an old torch lacks is a kernel of CUDA; other places ask for what they need."""
    joined = []
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    monkeypatch.setattr(launch, "prepare", lambda: None)

    def join(backend: str, timeout_s: float) -> None:
        joined.append(backend)
        raise InterruptedError

    monkeypatch.setattr(launch, "join", join)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "1")
    with pytest.raises(InterruptedError):
        launch.start()
    assert joined == ["gloo"]


def test_the_program_ends_with_one_error_and_makes_no_folder(tmp_path):
    done = run([sys.executable, "-c", PROGRAM, str(tmp_path / "run")], 120, check=False)
    assert done.returncode == 1
    assert done.stdout.count(f"torch {OLD} cannot train on CUDA") == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_network_interface_that_is_not_there_is_named(monkeypatch):
    def join(backend: str, timeout: timedelta) -> None:
        raise RuntimeError("[enforce fail at device.cc:84] ifa. Unable to find address for: eth7")

    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME: .*eth7; name one .*unset it"):
        launch.join("gloo", 1.0)


def test_a_variable_of_torchrun_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "a")
    with pytest.raises(ValueError, match="launch: RANK = 'a': not a number"):
        launch.start()
