"""Tensors of the host on their way to the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``; the host does not wait for the copy.

    CUDA copies from pageable memory only once everything queued before has run. From pinned memory the copy takes its place in
    the queue; torch does not give the pinned block to another tensor before that.
    """
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
