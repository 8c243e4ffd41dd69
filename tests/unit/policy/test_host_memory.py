"""Host memory in pieces: what page-locked memory really takes, and that no bit is lost between the
pieces."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.policy.state import host_memory, offload
from megatron_rl.policy.state.host_memory import HostBuffer, block_sizes, rounded

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (1, [1]),
        (2**18, [2**18]),
        (MIB + 3, [MIB, 3]),
        (64 * MIB, [64 * MIB]),
        (130 * MIB + 300 * 1024, [64 * MIB, 64 * MIB, 2 * MIB, 256 * 1024, 44 * 1024]),
    ],
)
def test_blocks_by_hand(num_bytes, sizes):
    assert block_sizes(num_bytes) == sizes


def test_one_tensor_would_take_the_next_power_of_two():
    assert [rounded(size) for size in (1, 2, 3, MIB, MIB + 1)] == [1, 2, 4, MIB, 2 * MIB]
    # The weights of a 70B model on one of 8 tensor ranks.
    weights = 2 * 70_600_000_000 // 8
    assert rounded(weights) == 32 * 2**30
    assert weights <= sum(map(rounded, block_sizes(weights))) < weights + 2**17


@pytest.mark.parametrize(
    "num_bytes", [1, 7168, 2**17 + 1, 2**18 + 1, 67_895_296, 544_997_376, 3_812_000_001]
)
def test_blocks_lose_less_than_half_of_the_smallest(num_bytes):
    sizes = block_sizes(num_bytes)
    assert sum(sizes) == num_bytes and max(sizes) <= host_memory.LARGEST_BLOCK
    assert (
        num_bytes
        <= sum(rounded(size) for size in sizes)
        < num_bytes + host_memory.SMALLEST_BLOCK // 2
    )
    assert [rounded(size) for size in sizes[:-1]] == sizes[:-1], "only the last is no power of two"


@pytest.fixture
def pinned(monkeypatch):
    """Page-locked memory without a CUDA driver: the sizes that were asked for. The pieces are
    small."""
    asked = []

    def allocate(num_bytes, is_pinned):
        assert is_pinned
        asked.append(num_bytes)
        return torch.full((num_bytes,), 99, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "_allocate", allocate)
    monkeypatch.setattr(host_memory, "LARGEST_BLOCK", 64)
    monkeypatch.setattr(host_memory, "SMALLEST_BLOCK", 8)
    return asked


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 63, 64, 65, 203])
def test_what_was_taken_is_given_back(pinned, num_bytes):
    source = torch.arange(num_bytes).to(torch.uint8)
    host = HostBuffer(num_bytes, pinned=True)
    host.take(source)
    target = torch.zeros_like(source)
    host.give(target)
    assert torch.equal(target, source)
    assert sum(pinned) == num_bytes and max(pinned, default=0) <= 64


def test_parts_offloaded_through_blocks_come_back_bit_for_bit(pinned, monkeypatch):
    monkeypatch.setattr(
        offload, "HostBuffer", lambda num_bytes, pinned: HostBuffer(num_bytes, pinned=True)
    )
    tensors = [
        torch.randn(123),
        torch.randn(5, 7, dtype=torch.bfloat16),
        torch.randn(3).to(torch.float64),
    ]
    want = [tensor.clone() for tensor in tensors]
    parts = offload.Offload({"weights": lambda: tensors}, (), torch.device("cpu"))
    for _ in range(2):
        parts.offload(["weights"])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        parts.reload()
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
    assert sum(pinned) == 4 * 123 + 2 * 35 + 8 * 3, "the second time uses the memory of the first"
    assert len(pinned) > 8
