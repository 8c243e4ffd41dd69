"""A plug-in: noise in the routers of the policy, new in every forward, as that of number formats
and kernels. With the engine's weights they choose other experts for some tokens."""

from __future__ import annotations

import megatron_rl.policy  # noqa: F401 (what megatron needs of it before it is imported)

# isort: split
import torch
from megatron.core.transformer.moe.router import TopKRouter

SIZE = 0.02  # standard deviation, in units of the logits
DRAW = torch.Generator().manual_seed(0)
PLAIN = TopKRouter.gating


def noisy(router: TopKRouter, states: torch.Tensor) -> torch.Tensor:
    logits = PLAIN(router, states)
    return logits + SIZE * torch.randn(logits.shape, generator=DRAW)


TopKRouter.gating = noisy
