"""Values and errors of one rank, sent to all ranks.

Other ranks may be workers of a server that was started separately, so values are plain data with
a schema (``runtime/plain_data.py``), never pickles.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import LostPeerError, WeightSyncError
from megatron_rl.runtime.plain_data import Schema, decoded, encoded


def all_gather(value: Any, schema: Schema, group: dist.ProcessGroup | None = None) -> list:
    """Collective: the values of all ranks, in their order. A single process needs no group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    own = _tensor(encoded(value, schema))
    # Tensors of a gather must be of one size: sizes first, then all padded to the largest.
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: own.numel()] = own
    messages = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(messages, padded, group)
    return [
        decoded(_content(message[: int(size)]), schema, f"rank {rank}")
        for rank, (message, size) in enumerate(zip(messages, sizes, strict=True))
    ]


def broadcast(
    value: Any, schema: Schema, source: int, group: dist.ProcessGroup | None = None
) -> Any:
    """Collective: the value of rank ``source`` of the group. A single process needs no group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value
    is_source = dist.get_rank(group) == source
    message = _tensor(encoded(value, schema)) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([message.numel()])
    dist.broadcast(size, group=group, group_src=source)
    if not is_source:
        message = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(message, group=group, group_src=source)
    return value if is_source else decoded(_content(message), schema, f"rank {source}")


def _tensor(message: bytes) -> Tensor:
    # A copy that may be written to: torch warns of tensors over memory that may not.
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _content(message: Tensor) -> bytes:
    return message.numpy().tobytes()


def raise_everywhere(
    error: Exception | None,
    advice: str = "",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Collective: when any rank has an error, all raise it, so that none continues alone or hangs.

    Raises:
        ValueError: there is no ``advice`` and the errors of all ranks that have one are such.
        WeightSyncError: otherwise; LostPeerError when a rank is gone. Ends with ``advice``.
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
        everyone = all_gather(own, tuple[str, bool] | None, group)
        errors = [entry for entry in everyone if entry is not None]
    except RuntimeError as gone:
        raise LostPeerError(
            f"rank {rank}: a peer is gone in the middle of the weight sync: {gone}. {advice}"
        ) from error or gone
    message = "; ".join(dict.fromkeys(text for text, _ in errors))
    if advice:
        raise WeightSyncError(f"{message}. {advice}") from error
    if all(is_value_error for _, is_value_error in errors):
        raise ValueError(message) from error
    raise WeightSyncError(message) from error


def _text(error: Exception, rank: int) -> str:
    """The message with the rank, unless it begins with it."""
    if str(error).startswith("rank "):
        return str(error)
    if isinstance(error, ValueError | WeightSyncError):
        return f"rank {rank}: {error}"
    return f"rank {rank}: {type(error).__name__}: {error}"
