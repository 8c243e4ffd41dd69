"""The experts that a router has chosen for tokens, in the bytes in which they travel with them.

Of each token ``layers x k`` numbers, of the layers that have experts: of one byte, and of two where
a model has more than 255 experts. A token whose bytes are all 255 brings none: its router chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from megatron_rl.models.base import Architecture

if TYPE_CHECKING:
    from megatron_rl.config.schema import ModelConfig, OptimConfig

NOT_GIVEN = 255


def expert_bytes(num_experts: int) -> int:
    """Bytes of one number. Examples: 1 of 128 and of 255 experts, 2 of 256."""
    return 1 if num_experts <= NOT_GIVEN else 2


def expert_width(arch: Architecture) -> int:
    """Bytes of a token. Example: 48 layers of 8 out of 128 experts are 384."""
    layers = arch.num_layers - arch.num_dense_layers
    return layers * arch.experts_per_token * expert_bytes(arch.num_experts)


def packed_experts(experts: Int[Tensor, "tokens k"], num_bytes: int) -> UInt8[Tensor, "tokens _"]:
    """Example: experts 3 and 300 of one token in two bytes each are ``[[3, 0, 44, 1]]``."""
    if num_bytes == 1:
        return experts.to(torch.uint8)
    return experts.to(torch.uint16).view(torch.uint8)


def unpacked_experts(
    packed: UInt8[Tensor, "tokens _"], num_bytes: int
) -> tuple[Int[Tensor, "tokens k"], Tensor]:
    """The inverse, and whether each token brings experts (``[tokens, 1]``)."""
    is_given = (packed != NOT_GIVEN).any(1, keepdim=True)
    wide = packed if num_bytes == 1 else packed.contiguous().view(torch.uint16)
    return wide.long(), is_given


def filled_in(
    first: UInt8[np.ndarray, "tokens width"], later: UInt8[np.ndarray, "more width"]
) -> UInt8[np.ndarray, "more width"]:
    """Those of ``first``, and of ``later``, which begins with the same tokens, where it has none.
    Example: ``[[3], [255]]`` and ``[[4], [5], [255]]`` are ``[[3], [5], [255]]``."""
    result = later.copy()
    is_given = (first != NOT_GIVEN).any(1)
    result[: len(first)][is_given] = first[is_given]
    return result


def not_given(num_tokens: int, width: int) -> UInt8[np.ndarray, "tokens width"]:
    """Of tokens that bring none, ``width`` bytes each."""
    return np.full((num_tokens, width), NOT_GIVEN, np.uint8)


def router_problems(
    arch: Architecture, model: ModelConfig, optim: OptimConfig, keep_reference: bool
) -> list[str]:
    """What of the settings of routers does not suit the model: key, value, remedy."""
    refusals = (
        ("router", not arch.num_experts, "the model has no experts"),
        ("router", model.lora.rank is not None, "adapters (model.lora) leave routers as they are"),
        ("router_bias", not arch.sigmoid_router, f"routers of family {arch.family} have no bias"),
        ("router_bias", keep_reference, "a KL term (method.kl) has a reference, and it would move"),
    )
    problems = []
    for key in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_rate"):
        reasons = [why for of, refused, why in refusals if refused and key.startswith(of)]
        if reasons and getattr(optim, key):
            value = getattr(optim, key)
            problems.append(f"optim.{key} = {value:g}: {reasons[0]}; set it to 0")
    return problems
