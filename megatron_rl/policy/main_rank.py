"""What rank 0 does for all: files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def on_main(action: Callable[[], Any]) -> None:
    """Collective: rank 0 runs ``action``, all ranks wait for it.

    Its exception is raised on every rank: one that continued alone would hang in the next
    collective. ``World.from_main`` does so for the trainer; the policy is built on
    torch.distributed alone, without a World.
    """
    error: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:  # noqa: BLE001 - raised again below, everywhere
            error[0] = raised
    dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise error[0]
