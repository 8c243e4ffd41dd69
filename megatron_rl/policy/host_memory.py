"""Host memory for copies of what is on the device, in pieces that page-locked memory does not make
larger."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# torch takes page-locked memory in powers of two: one piece of 17 GB would take 32 GiB.
LARGEST_PIECE = 2**26  # 64 MiB
SMALLEST_PIECE = 2**18  # 256 KiB


def piece_sizes(num_bytes: int) -> list[int]:
    """Sizes of the pieces that together hold ``num_bytes``: powers of two from 64 MiB down to 256
    KiB, and what remains below that.

    Example: 130 MiB and 300 KiB are 64, 64 and 2 MiB, 256 and 44 KiB.
    """
    sizes = []
    piece = LARGEST_PIECE
    left = num_bytes
    while left > 0:
        if piece > left and piece > SMALLEST_PIECE:
            piece //= 2
            continue
        sizes.append(min(piece, left))
        left -= sizes[-1]
    return sizes


def rounded(num_bytes: int) -> int:
    """Bytes that torch takes from the system for one page-locked tensor of ``num_bytes``: the next
    power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that a page-locked ``HostBuffer`` takes from the system: less than 128 KiB more than it
    holds."""
    return sum(rounded(size) for size in piece_sizes(num_bytes))


class HostBuffer:
    """``num_bytes`` of host memory. ``pinned``: page-locked, so that a CUDA device copies from and
    to it without the host waiting; without, it is one piece. What it holds at first is not
    defined."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        sizes = piece_sizes(num_bytes) if pinned else [num_bytes]
        self._pieces = [_allocate(size, pinned) for size in sizes]

    @property
    def whole(self) -> Tensor:
        """All bytes as one tensor. Only memory that is not page-locked is in one piece."""
        (piece,) = self._pieces
        return piece

    def take(self, source: Tensor) -> None:
        """Starts to copy ``source`` (``num_bytes`` bytes) into the pieces; the host may read them
        after a synchronization."""
        for piece, part in self._pairs(source):
            piece.copy_(part, non_blocking=True)

    def give(self, target: Tensor) -> None:
        """Starts to copy the pieces into ``target`` (``num_bytes`` bytes), in order with the other
        work of the device."""
        for piece, part in self._pairs(target):
            part.copy_(piece, non_blocking=True)

    def _pairs(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert flat.dtype == torch.uint8 and flat.numel() == self.num_bytes, (
            f"{flat.numel()} bytes for {self.num_bytes}"
        )
        start = 0
        for piece in self._pieces:
            yield piece, flat[start : start + piece.numel()]
            start += piece.numel()


def _allocate(num_bytes: int, pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
