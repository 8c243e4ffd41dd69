"""Are the weights numbers? Looked at before they leave the policy, so that NaN never spreads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import NonFiniteError
from megatron_rl.policy.precision import plain

SHOWN = 4


def not_finite(tensors: Iterable[Tensor]) -> list[int]:
    """Which of ``tensors`` hold NaN or infinity. One pass over each, without a copy, and one wait for the device."""
    # The largest absolute value is NaN or infinite exactly where one of the values is.
    largest = [torch.linalg.vector_norm(tensor.detach(), ord=float("inf")).float() for tensor in tensors]
    finite = torch.stack(largest).isfinite().tolist() if largest else []
    return [index for index, good in enumerate(finite) if not good]


def check_weights(
    named: Sequence[tuple[tuple[str, ...], Tensor]], device: torch.device, step: int, learning_rate: float | None
) -> None:
    """Collective, one number moved a rank. ``named``: this rank's parameters with the names of the HF tensors in them;
    ``learning_rate``: of the last optimizer step, None before the first.

    Raises:
        NonFiniteError: on every rank, when a parameter of any rank is not finite; names step and tensors.
    """
    bad = not_finite(plain(tensor) for _, tensor in named)
    total = torch.tensor([len(bad)], device=device)
    dist.all_reduce(total)
    if total.item() == 0:
        return
    mine = [name for index in bad for name in named[index][0]]
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
