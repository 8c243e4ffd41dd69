"""Digests of tensors: two copies of a weight are the same when their digests are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

ROW_WORDS = 512
ROW_BYTES = 8 * ROW_WORDS
PIECE_BYTES = 1 << 19  # on a CPU: what a core's cache keeps between two uses
FILE_PIECE_BYTES = 1 << 20
HASH_BYTES = 16

Kind = Literal["hash", "sums"]


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


def file_digest(path: Path) -> str:
    """128-bit XXH3 of the bytes of a file, in hexadecimal; reads ``FILE_PIECE_BYTES`` at a time."""
    state = xxhash.xxh3_128()
    piece = memoryview(bytearray(FILE_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            state.update(piece[:size])
    return state.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One digest of a set of named digests, whatever their order."""
    return xxhash.xxh3_128("".join(f"{name}={value};" for name, value in sorted(digests.items())).encode()).hexdigest()


def kind_on(device: torch.device | str) -> Kind:
    """How data is told apart where it lies: on a CPU by a hash, elsewhere by sums, which need not leave the device."""
    return "hash" if torch.device(device).type == "cpu" else "sums"


def checksum(data: Tensor, kind: Kind) -> Tensor:
    """Some bytes that tell ``data`` (uint8, contiguous, at an offset that is a multiple of 8) from other data, on the same device: hash is
    XXH3 with 128 bits, on a CPU only; sums are ``word_sums``. Both read the data once or twice and write next to nothing.
    """
    if kind == "sums":
        return word_sums(data)
    return torch.frombuffer(bytearray(xxhash.xxh3_128(memoryview(data.numpy())).digest()), dtype=torch.uint8)


def word_sums(data: Tensor) -> Tensor:
    """Sums of the bytes, in torch's own operations on any device; ``8 r + 4096 + rest`` bytes, 0.2 % of the data.

    The bytes are a matrix of 64-bit words, 512 to a row: the sums of the ``r`` whole rows and of the 512 columns modulo 2^64, then the
    bytes behind the last whole row as they are.

    What stays unnoticed: changes behind the last row never. Elsewhere the changes, as differences of words, must add up to 0 in every
    row and in every column, so at least four words in two rows and two columns are wrong by exactly opposite amounts. Hence always
    noticed: anything wrong in up to three words, within one row, or within one column, and two words exchanged. Where the bytes
    that came have nothing to do with those that were sent (another bucket, shifted, zero, stale), each sum of a row or column that
    is concerned agrees by chance with probability 2^-64. The sums are no defence against an adversary.
    """
    whole = data.numel() // ROW_BYTES * ROW_BYTES
    words = data[:whole].view(torch.int64).view(whole // ROW_BYTES, ROW_WORDS)
    return torch.cat([words.sum(1).view(torch.uint8), words.sum(0).view(torch.uint8), data[whole:]])


def checksum_bytes(size: int, kind: Kind) -> int:
    """Length of the checksum of ``size`` bytes."""
    return HASH_BYTES if kind == "hash" else size // ROW_BYTES * 8 + ROW_BYTES + size % ROW_BYTES


def changed_spans(one: Tensor, other: Tensor, size: int) -> list[tuple[int, int]]:
    """Bytes ``[begin, end)`` of ``size`` in which the data of two different checksums differ: rows of the sums, else everything."""
    if one.numel() == HASH_BYTES:
        return [(0, size)]
    rows, different = size // ROW_BYTES, one != other
    found = different[: 8 * rows].view(rows, 8).any(1).nonzero().flatten().tolist()
    spans = [(row * ROW_BYTES, (row + 1) * ROW_BYTES) for row in found]
    if different[8 * rows + ROW_BYTES :].any():
        spans.append((rows * ROW_BYTES, size))
    return spans or [(0, rows * ROW_BYTES)]


def piece_bytes(size: int, kind: Kind) -> int:
    """How much of ``size`` bytes to read at a time: for a hash what fits the cache of a CPU; for sums everything, in few kernels."""
    return PIECE_BYTES if kind == "hash" else max(1, size)


def quick_digest(tensor: Tensor, kind: Kind) -> str:
    """hash: ``tensor_digest``. sums: another value that tells the same apart; only the ``word_sums`` come to the host."""
    if kind == "hash":
        return tensor_digest(tensor)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = word_sums(data.clone() if data.storage_offset() % 8 else data)
    state = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(memoryview(sums.cpu().numpy()))
    return state.hexdigest()
