"""What one rank does for all: files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def on_main(action: Callable[[], Any]) -> None:
    """Collective: rank 0 runs ``action``, all ranks wait for it, and its exception is raised on every rank (a rank that went on
    alone would wait in the next collective for ever)."""
    error: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is raised again below, everywhere
            error[0] = raised
    dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise error[0]
