"""Digests of tensors: two copies of a weight are the same when their digests are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


class WeightSyncError(RuntimeError):
    """The weights an engine received are not the weights that were sent. The message names the tensors."""


def tensor_digest(tensor: Tensor) -> str:
    """128-bit digest, in hexadecimal, of dtype, shape and the bytes in row-major order.

    Strides and device do not matter. A tensor on an accelerator is copied to the host first.
    Source: XXH3 with 128 bits of the xxHash library; it is not a cryptographic hash.
    """
    values = tensor.detach().contiguous().cpu()
    state = xxhash.xxh3_128(f"{values.dtype}{tuple(values.shape)}".encode())
    if values.numel():
        state.update(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
    return state.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest of a set of named digests, whatever their order."""
    return xxhash.xxh3_128("".join(f"{name}={value};" for name, value in sorted(digests.items())).encode()).hexdigest()
