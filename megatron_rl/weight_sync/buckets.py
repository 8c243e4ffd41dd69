"""Buckets of bytes: packed from local parameters, unpacked into them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.protocols import Parameters
from megatron_rl.weight_sync.planner.program import BucketChunk, Message
from megatron_rl.weight_sync.planner.shards import View


def strided(parameter: Tensor, view: View) -> Tensor:
    """The view of a parameter that a shard describes, without gradient. Offsets count from the
    parameter's own first element."""
    offset = parameter.storage_offset() + view.offset
    return parameter.detach().as_strided(view.shape, view.stride, offset)


def pack(message: Message, source: Parameters, buffer: Tensor, done: Callable[[str], None]) -> None:
    """Gathers the bytes of a bucket from the local parameters, cast to the dtype of the stream;
    ``done(key)`` after each view."""
    for chunk in message.chunks:
        (landing,) = chunk.landings
        values = strided(source(landing.view.key), landing.view)
        _block(message, chunk, buffer).copy_(values)
        done(landing.view.key)


def unpack(
    message: Message, buffer: Tensor, target: Parameters, done: Callable[[str], None]
) -> None:
    """Scatters the bytes of a bucket into the local parameters; ``done(key)`` after each view."""
    for chunk in message.chunks:
        block = _block(message, chunk, buffer)
        for landing in chunk.landings:
            place = strided(target(landing.view.key), landing.view)
            place.copy_(block[landing.window])
            done(landing.view.key)


def _block(message: Message, chunk: BucketChunk, buffer: Tensor) -> Tensor:
    """The chunk's part of the buffer, in its shape; ``begin`` counts elements."""
    typed = buffer.view(getattr(torch, message.stream.dtype))
    end = chunk.begin + math.prod(chunk.region.shape)
    return typed[chunk.begin : end].view(chunk.region.shape)
