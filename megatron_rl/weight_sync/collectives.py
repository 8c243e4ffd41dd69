"""What one rank knows, made known to all: values, and failures."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime.launch import gather_objects


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Collective: the values of all ranks, in their order. A single process needs no group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    return gather_objects(value, group)


def broadcast(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Collective: the value of rank ``source`` of the group. A single process needs no group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def raise_everywhere(
    error: Exception | None,
    advice: str = "",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Collective: when any rank has an error, every rank raises it, so that none goes on alone or
    hangs.

    Raises:
        ValueError: there is no ``advice`` and the errors of all ranks that have one are such.
        WeightSyncError: otherwise; also when a rank is gone. Ends with ``advice``.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    rank = dist.get_rank(group)
    try:
        # One number in the usual case; texts are gathered only when there are any.
        failed = torch.tensor(float(error is not None), device=device)
        dist.all_reduce(failed, group=group)
        if not failed:
            return
        own = None if error is None else (_text(error, rank), isinstance(error, ValueError))
        errors = [entry for entry in all_gather(own, group) if entry is not None]
    except RuntimeError as gone:
        raise WeightSyncError(
            f"rank {rank}: a peer is gone in the middle of the weight sync: {gone}. {advice}"
        ) from error or gone
    wrong_input = all(is_value_error for _, is_value_error in errors)
    error_type = ValueError if wrong_input and not advice else WeightSyncError
    message = "; ".join(dict.fromkeys(text for text, _ in errors))
    raise error_type(f"{message}. {advice}" if advice else message) from error


def _text(error: Exception, rank: int) -> str:
    """The message with the rank, unless it begins with it."""
    if str(error).startswith("rank "):
        return str(error)
    if isinstance(error, ValueError | WeightSyncError):
        return f"rank {rank}: {error}"
    return f"rank {rank}: {type(error).__name__}: {error}"
