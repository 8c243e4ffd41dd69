"""Copies to the device: pinned and queued on CUDA, nothing on the CPU."""

from __future__ import annotations

from unittest import mock

import torch

from megatron_rl.runtime.device import to_device


def test_on_the_cpu_the_tensor_itself():
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_on_cuda_the_host_does_not_wait():
    """The answer of CUDA is made up: which calls are made, in which order."""
    calls = []

    def pin(tensor):
        calls.append("pin")
        return tensor

    def move(tensor, device, **how):
        calls.append((str(device), how))
        return tensor

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "to", move),
    ):
        to_device(torch.arange(3), torch.device("cuda", 1))
        to_device(torch.arange(0), torch.device("cuda", 1))
    assert calls == [
        "pin",
        ("cuda:1", {"non_blocking": True}),
        ("cuda:1", {}),
    ], "nothing to copy: nothing to pin"
