"""A remedy for vLLM's CPU build: rotary embedding of a part of each head."""

from functools import cache
from typing import Any

import torch


@cache
def rotate_strided_parts() -> None:
    """Latent attention rotates the last numbers of each head: a view with strides, which vLLM's
    operator for CPUs reads as if it were dense, so that logprobs are off by 0.2 to 0.4 nats (vLLM
    0.32.0, ``rotary_embedding/base.py``). Such a view goes to vLLM's own form in torch."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    of_dense = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> Any:
        is_part = query.dim() == 3 and not query.is_contiguous()
        rotate = RotaryEmbedding.forward_native if is_part else of_dense
        return rotate(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu
