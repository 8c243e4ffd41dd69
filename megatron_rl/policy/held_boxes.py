"""What this rank's Megatron parameters hold of the HF tensors, as the boxes that a planned weight sync speaks of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.policy.families import Architecture
from megatron_rl.policy.layout import hf_shapes
from megatron_rl.policy.weights import Held
from megatron_rl.types import Box


def key(item: Held) -> str:
    """``<chunk>:<name of the parameter in the chunk>``."""
    return f"{item.chunk}:{item.name}"


def held_boxes(held: Sequence[Held], arch: Architecture) -> list[Box]:
    """The boxes of all parameters. The head of a tied model, where a stage has a copy of it, holds the embedding; padding of the
    vocabulary is in no box.

    Example: tensor rank 1 of 2, hidden size 4, one head of dimension 2 a rank: the key rows of ``linear_qkv`` are ``Box(
    "model.layers.0.self_attn.k_proj.weight", (4, 4), "float32", (2, 0), (2, 4), "0:decoder.layers.0.self_attention.linear_qkv.weight",
    8, (4, 1))``.
    """
    found = []
    for item in held:
        shapes, dtype = hf_shapes(item.parameter, arch), str(item.tensor.dtype).removeprefix("torch.")
        size = tuple(item.tensor.shape)
        stride = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
        for box in item.boxes:
            offset = sum(at * step for at, step in zip(box.local, stride, strict=True))
            found.append(Box(box.name, shapes[box.name], dtype, box.start, box.shape, key(item), offset, stride))
    return found
