"""The ledger's figure of the engine, against vLLM's own allocator falling asleep and waking in
parts."""

from __future__ import annotations

import pytest
import torch
from vllm.device_allocator import AllocationData, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from megatron_rl.engine.engine import VllmEngine

# Bytes by tag, as the worker gives them out.
BYTES = {"weights": 1000, "kv_cache": 200, "runtime": 30, "workspace": 4, "cudagraph": 0.5}


@pytest.fixture
def backend(monkeypatch):
    """vLLM's allocator with one allocation a tag; only the driver is missing."""
    allocator = cumem.CuMemAllocator()
    for pointer, (tag, size) in enumerate(BYTES.items()):
        allocator.pointer_to_data[pointer] = AllocationData((0, size, pointer, 0), tag)
    # Nothing to copy: what is kept would be read from the device.
    monkeypatch.setattr(
        cumem,
        "libcudart",
        type("Driver", (), {"cudaMemcpy": staticmethod(lambda *arguments: None)}),
    )
    monkeypatch.setattr(cumem.torch, "empty", lambda *sizes, **options: torch.zeros(1))
    for name in ("create_and_map", "unmap_and_release"):
        monkeypatch.setattr(cumem, name, lambda handle: None)
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: allocator)
    return CuMemBackend()


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_is_not_counted(backend, level):
    engine = object.__new__(VllmEngine)
    engine._can_sleep = True
    assert engine.memory_bytes() == sum(BYTES.values())
    backend.suspend(level)
    assert engine.memory_bytes() == 0
    backend.resume(["weights"])
    assert engine.memory_bytes() == sum(BYTES.values()) - BYTES["kv_cache"]
    backend.resume(["kv_cache"])
    assert engine.memory_bytes() == sum(BYTES.values())


def test_without_sleep_mode_torch_counts_it():
    engine = object.__new__(VllmEngine)
    engine._can_sleep = False
    assert engine.memory_bytes() == 0
