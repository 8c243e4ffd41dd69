"""Digests of tensors: two copies of a weight are the same when their digests are."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

_ROW_WORDS = 512
ROW_BYTES = 8 * _ROW_WORDS

Kind = Literal["hash", "sums"]


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


def file_digest(path: Path) -> str:
    """128-bit XXH3 of the bytes of a file, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest of a set of named digests, whatever their order."""
    text = "".join(f"{name}={value};" for name, value in sorted(digests.items()))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def kind_on(device: torch.device | str) -> Kind:
    """The checksum for data on ``device``: a hash on a CPU, else sums, which stay on the device."""
    return "hash" if torch.device(device).type == "cpu" else "sums"


def checksum(data: Tensor, kind: Kind) -> Tensor:
    """A uint8 tensor that differs where ``data`` differs, on the same device.

    hash: XXH3 with 128 bits, on a CPU only; sums: ``word_sums``. Both read the data once or twice
    and write next to nothing.

    Args:
        data: uint8, contiguous, at an offset that is a multiple of 8.
    """
    if kind == "sums":
        return word_sums(data)
    digest = xxhash.xxh3_128(memoryview(data.numpy())).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def word_sums(data: Tensor) -> Tensor:
    """Row and column sums of the data as a matrix of 64-bit words, on any device.

    uint8[n] -> uint8[8 r + 4096 + tail], 0.2 % of the data: the sums of the ``r`` whole rows of 512
    words and of the 512 columns modulo 2^64, then the tail after the last whole row as it is.

    Detected: every change in the tail, and elsewhere every change of up to three words, within one
    row or within one column, and every exchange of two words. Undetected: only changes that cancel
    in all row and column sums, which takes at least four words in two rows and two columns that are
    wrong by exactly opposite amounts. Of unrelated data (another bucket, shifted, zero, stale) each
    sum agrees by chance with probability 2^-64. The sums are no defense against an adversary.
    """
    whole = data.numel() // ROW_BYTES * ROW_BYTES
    words = data[:whole].view(torch.int64).view(whole // ROW_BYTES, _ROW_WORDS)
    row_sums = words.sum(1).view(torch.uint8)
    return torch.cat([row_sums, words.sum(0).view(torch.uint8), data[whole:]])


def quick_digest(tensor: Tensor, kind: Kind) -> str:
    """A digest of dtype, shape and values that leaves large data where it is.

    hash: ``tensor_digest``. sums: XXH3 of the ``word_sums``, which alone are copied to the host.
    """
    if kind == "hash":
        return tensor_digest(tensor)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    # A view as 64-bit words needs an aligned offset; a clone starts at 0.
    sums = word_sums(data.clone() if data.storage_offset() % 8 else data)
    state = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(memoryview(sums.cpu().numpy()))
    return state.hexdigest()
