"""Are the weights numbers? Looked at before they leave the policy, so that NaN never spreads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import NonFiniteError
from megatron_rl.policy.precision import plain
from megatron_rl.policy.weights import Held

SHOWN = 4


def not_finite(tensors: Sequence[Tensor]) -> list[int]:
    """Which of ``tensors`` hold NaN or infinity. One pass over each, without a copy, and one wait for the device."""
    indices = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    if not indices:
        return []
    # The largest absolute value is NaN or infinite exactly where one of the values is.
    largest = [torch.linalg.vector_norm(tensors[index].detach(), ord=float("inf")).float() for index in indices]
    finite = torch.stack(largest).isfinite().tolist()
    return [index for index, good in zip(indices, finite, strict=True) if not good]


def check_weights(held: Sequence[Held], device: torch.device, step: int, learning_rate: float | None) -> None:
    """Collective, one number moved a rank. ``learning_rate``: of the last optimizer step, None before the first.

    Raises:
        NonFiniteError: on every rank, when a parameter of any rank is not finite; names step and tensors.
    """
    tensors = [plain(item.tensor) for item in held]
    bad = not_finite(tensors)
    total = torch.tensor([len(bad)], device=device)
    dist.all_reduce(total)
    if total.item() == 0:
        return
    mine = [name for index in bad for name in held[index].parameter.names]
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = sorted({name for found in everyone for name in found})
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    rate = "before the first optimizer step" if learning_rate is None else f"learning rate {learning_rate:g}"
    raise NonFiniteError(
        f"step {step}: weights of {len(names)} tensors are not finite ({rate}): {shown}; they are neither given to the "
        "engine, nor saved, nor exported. Lower optim.learning_rate, or clip gradients (optim.clip_grad); "
        "resume=auto goes on from the last checkpoint"
    )
