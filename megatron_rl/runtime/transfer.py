"""Copies from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``; the host does not wait for the copy.

    CUDA copies from pageable memory only after everything queued before has run. From pinned memory
    the copy is queued like a kernel; torch reuses the pinned block only after it.
    """
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
