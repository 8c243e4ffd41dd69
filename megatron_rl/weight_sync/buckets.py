"""Buckets of bytes: packed from local parameters, unpacked into them, checksums taken on the
way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_rl.protocols import Parameters
from megatron_rl.runtime.digest import Kind, checksum, kind_on, piece_bytes
from megatron_rl.weight_sync.planner.program import Message
from megatron_rl.weight_sync.planner.shards import View


def strided(parameter: Tensor, view: View) -> Tensor:
    """The view of a parameter that a shard describes, without gradient. Offsets count from the
    parameter's own first element."""
    offset = parameter.storage_offset() + view.offset
    return parameter.detach().as_strided(view.shape, view.stride, offset)


class RunningChecksum:
    """Checksums of the pieces of a buffer, each taken while its bytes are in the cache: just
    written, or about to be read."""

    def __init__(self, buffer: Tensor, kind: Kind, piece: int | None = None) -> None:
        self.buffer = buffer
        self.kind = kind
        # The receiver cuts a bucket into the same pieces: both follow from its size and kind.
        self.piece = piece or piece_bytes(buffer.numel(), kind)
        self.end = 0  # the bytes before it have their checksums
        self.sums: list[Tensor] = []

    def written(self, end: int) -> None:
        """The bytes before ``end`` are there: takes the pieces that are complete."""
        size = self.buffer.numel()
        while self.end < size and min(self.end + self.piece, size) <= end:
            piece = self.buffer[self.end : self.end + self.piece]
            self.sums.append(checksum(piece, self.kind))
            self.end += piece.numel()

    def wanted(self, end: int) -> None:
        """The bytes before ``end`` are about to be read, and all bytes are there: takes whole
        pieces."""
        whole_pieces = -(-end // self.piece) * self.piece
        self.written(min(self.buffer.numel(), whole_pieces))

    def result(self) -> Tensor:
        """All checksums on the host; from an accelerator without waiting for it."""
        assert self.end == self.buffer.numel()
        return torch.cat(self.sums).to("cpu", non_blocking=True)


def pack(
    message: Message,
    source: Parameters,
    buffer: Tensor,
    sums: RunningChecksum | None = None,
    done: Callable[[str], None] = lambda key: None,
) -> None:
    """Gathers the bytes of a bucket from the local parameters, cast to the dtype of the stream;
    ``done(key)`` after each view."""
    typed = buffer.view(getattr(torch, message.stream.dtype))
    for chunk in message.chunks:
        (landing,) = chunk.landings
        end = chunk.begin  # elements of the bucket that are packed
        block = typed[end : end + math.prod(chunk.region.shape)].view(chunk.region.shape)
        values = strided(source(landing.view.key), landing.view)
        for to_rows, from_rows in _rows(block, values, sums):
            to_rows.copy_(from_rows)
            end += from_rows.numel()
            if sums is not None:
                sums.written(end * typed.element_size())
        done(landing.view.key)


def unpack(
    message: Message,
    buffer: Tensor,
    target: Parameters,
    done: Callable[[str], None],
    sums: RunningChecksum | None = None,
) -> None:
    """Scatters the bytes of a bucket into the local parameters; ``done(key)`` after each view."""
    typed = buffer.view(getattr(torch, message.stream.dtype))
    for chunk in message.chunks:
        block = typed[chunk.begin : chunk.begin + math.prod(chunk.region.shape)]
        block = block.view(chunk.region.shape)
        for landing in chunk.landings:
            row = landing.window[0].start  # of the chunk: those before it are read, or not needed
            place = strided(target(landing.view.key), landing.view)
            for to_rows, from_rows in _rows(place, block[landing.window], sums):
                row += from_rows.shape[0]
                if sums is not None:
                    # The rows end there at the latest; a window may be narrower than its chunk.
                    end = chunk.begin + row * block.stride(0)
                    sums.wanted(end * typed.element_size())
                to_rows.copy_(from_rows)
            done(landing.view.key)


def _rows(
    target: Tensor, values: Tensor, sums: RunningChecksum | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, some rows of each at a time: as many as a piece of the checksum has
    room for."""
    size = target.numel() * target.element_size()
    piece = piece_bytes(size, kind_on(target.device))
    if sums is not None:
        piece = sums.piece
    count = max(1, piece * target.shape[0] // size)  # a row has size / target.shape[0] bytes
    yield from zip(target.split(count), values.split(count), strict=True)
