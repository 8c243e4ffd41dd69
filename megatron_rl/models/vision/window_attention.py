"""Attention of a vision tower within its windows: one call a block, or one for each length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from megatron_rl.runtime.device import to_device

Heads = Float[Tensor, "patches heads width"]


@dataclass(frozen=True)
class Windows:
    """Which patches see each other: those of a window, which are neighbors.

    Attributes:
        boundaries: int32, where windows begin, and the end; of the device of the patches.
        longest: patches of the longest window.
        by_length: length of a window -> the patches of those that long, window after window.
    """

    boundaries: Int[Tensor, " windows_plus_1"]
    longest: int
    by_length: dict[int, Int[Tensor, " n"]]

    @classmethod
    def of(cls, boundaries: Int[Tensor, " n"], put: Callable[[Tensor], Tensor]) -> Windows:
        """``boundaries``: of the host, where windows may be empty; ``put``: to the device."""
        starts, lengths = boundaries[:-1].long(), boundaries.diff().long()
        by_length = {
            length: put((starts[lengths == length, None] + torch.arange(length)).flatten())
            for length in lengths.unique().tolist()
            if length
        }
        return cls(put(boundaries.int()), int(lengths.max()), by_length)

    def attend(self, query: Heads, key: Heads, value: Heads, scale: float) -> Heads:
        if query.is_cuda and query.element_size() == 2:  # what the kernel of ragged lengths takes
            from torch.nn.attention.varlen import varlen_attn

            ends, longest = self.boundaries, self.longest
            found = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale)
            assert isinstance(found, Tensor)
            return found
        result = torch.empty_like(query)
        for length, places in self.by_length.items():
            # [patches, heads, width] -> [windows, heads, length, width], and back
            parts = (
                each.index_select(0, places).unflatten(0, (-1, length)).transpose(1, 2)
                for each in (query, key, value)
            )
            found = F.scaled_dot_product_attention(*parts, scale=scale).transpose(1, 2)
            result = result.index_copy(0, places, found.flatten(0, 1))
        return result


def window_tower(
    hf: Any, tower: Any, attention: Any, rotate: Callable[..., Any]
) -> torch.nn.Module:
    """A ``tower`` of transformers, which makes one call of ``attention`` for each window or image
    and reads the boundaries in each block, with one call for all of them and no read. Its
    parameters have the names of ``Vision.tensors`` below "visual.".

    ``tower(pixels, grid_thw)`` takes the grids of the host: all that follows from them is made
    there and queued. ``rotate``: the rotary embedding of ``attention``.
    """

    class WindowAttention(attention):
        def forward(
            self, hidden_states: Tensor, cu_seqlens: Windows, position_embeddings: Any, **_: Any
        ) -> Tensor:
            parts = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
            query, key = rotate(*parts[:2], *position_embeddings)
            found = cu_seqlens.attend(query, key, parts[2], self.scaling)
            return self.proj(found.flatten(1))

    class WindowTower(tower):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for block in self.blocks:
                block.attn.__class__ = WindowAttention

        def forward(self, hidden_states: Tensor, grid_thw: Int[Tensor, "images 3"]) -> Any:
            put = partial(to_device, device=hidden_states.device)
            merge = self.spatial_merge_size
            more: dict[str, Any] = {}
            if hasattr(self, "window_size"):  # some blocks look at a part of an image
                order, windows = get_vision_window_index(
                    grid_thw, merge, self.window_size, self.patch_size
                )
                more = dict(window_index=put(order), cu_window_seqlens=Windows.of(windows, put))
            if hasattr(self, "pos_embed"):  # learned positions, of a square of other size
                taps, weights = get_vision_interpolation_indices_and_weights(
                    grid_thw,
                    self.num_grid_per_side,
                    mode=self.interpolation_mode,
                    align_corners=self.interpolation_align_corners,
                    spatial_merge_size=merge,
                )
                more |= dict(interp_indices=put(taps), interp_weights=put(weights))
            return super().forward(
                hidden_states,
                grid_thw=grid_thw,
                position_ids=put(get_vision_position_ids(grid_thw, merge)),
                cu_seqlens=Windows.of(get_vision_cu_seqlens(grid_thw), put),
                **more,
            )

    return WindowTower._from_config(hf.vision_config, attn_implementation="sdpa")
