"""Refuses weights that are NaN or infinite before they leave the policy."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import NonFiniteError, first_few
from megatron_rl.policy.precision import plain
from megatron_rl.runtime.launch import gather_objects

SHOWN = 4


def not_finite(tensors: Iterable[Tensor]) -> list[int]:
    """Indices of those ``tensors`` that hold NaN or infinity.

    One pass over each, without a copy, and one wait for the device.
    """
    # The largest absolute value is NaN or infinite exactly where one of the values is.
    infinity = float("inf")
    largest = [torch.linalg.vector_norm(each.detach(), ord=infinity).float() for each in tensors]
    if not largest:
        return []
    return (~torch.stack(largest).isfinite()).nonzero().squeeze(1).tolist()


def check_weights(
    named: Sequence[tuple[tuple[str, ...], Tensor]],
    device: torch.device,
    step: int,
    learning_rate: float | None,
) -> None:
    """Collective: exchanges one number per rank while all weights are finite.

    Args:
        named: this rank's parameters, with the names of the HF tensors in them.
        learning_rate: of the last optimizer step; None before the first.

    Raises:
        NonFiniteError: on all ranks, when a parameter of any is not finite; names step and tensors.
    """
    bad = not_finite(plain(tensor) for _, tensor in named)
    total = torch.tensor([len(bad)], device=device)
    dist.all_reduce(total)
    if total.item() == 0:
        return
    own_names = {name for place in bad for name in named[place][0]}
    names = sorted(set().union(*gather_objects(own_names)))
    shown = ", ".join(first_few(names, SHOWN, "..."))
    before = learning_rate is None
    rate = "before the first optimizer step" if before else f"learning rate {learning_rate:g}"
    raise NonFiniteError(
        f"step {step}: weights of {len(names)} tensors are not finite ({rate}): {shown}; they are"
        " neither given to the engine, nor saved, nor exported. Lower optim.learning_rate, or clip"
        " gradients (optim.clip_grad); resume=auto resumes from the last checkpoint"
    )
