"""Host memory for copies of what is on the device, in blocks that page-locking does not enlarge."""

from collections.abc import Iterator

import torch
from torch import Tensor

# torch takes page-locked memory in powers of two: one block of 17 GB would take 32 GiB.
LARGEST_BLOCK = 2**26  # 64 MiB
SMALLEST_BLOCK = 2**18  # 256 KiB


def block_sizes(num_bytes: int) -> list[int]:
    """Sizes of the blocks that together hold ``num_bytes``.

    Powers of two from 64 MiB down to 256 KiB, and the rest.

    Example: 130 MiB and 300 KiB are 64, 64 and 2 MiB, 256 and 44 KiB.
    """
    sizes = []
    block = LARGEST_BLOCK
    left = num_bytes
    while left > 0:
        if block > left and block > SMALLEST_BLOCK:
            block //= 2
            continue
        sizes.append(min(block, left))
        left -= sizes[-1]
    return sizes


def rounded(num_bytes: int) -> int:
    """Bytes that torch takes from the system for a page-locked tensor: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


class HostBuffer:
    """``num_bytes`` of host memory in blocks, uninitialized.

    ``pinned``: page-locked, so that a CUDA device copies from and to it while the host continues.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._blocks = [_allocate(size, pinned) for size in block_sizes(num_bytes)]

    def take(self, source: Tensor) -> None:
        """Starts to copy ``source`` (``num_bytes`` bytes) into the buffer.

        The host may read it after a synchronization.
        """
        for block, part in self._pairs(source):
            block.copy_(part, non_blocking=True)

    def give(self, target: Tensor) -> None:
        """Starts to copy the buffer into ``target`` (``num_bytes`` bytes).

        The copy is in order with the other work of the device.
        """
        for block, part in self._pairs(target):
            part.copy_(block, non_blocking=True)

    def _pairs(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        assert flat.dtype == torch.uint8 and flat.numel() == self.num_bytes, (
            f"{flat.numel()} bytes for {self.num_bytes}"
        )
        start = 0
        for block in self._blocks:
            yield block, flat[start : start + block.numel()]
            start += block.numel()


def _allocate(num_bytes: int, pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def synchronize(device: torch.device) -> None:
    """Waits until the device has ended all copies."""
    if device.type == "cuda":
        torch.cuda.synchronize()
