"""Comparison of the weights sent with the weights received, on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from megatron_rl.runtime.digest import WeightSyncError, combined_digest

MAX_NAMES_SHOWN = 8


def verify_transfer(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Collective: every rank sent and received the same tensors. ``sent`` and ``received``: digest of each HF-named tensor.

    Two digests a rank are exchanged when all is well; the tables only when it is not, to name the tensors.

    Raises:
        WeightSyncError: on every rank, naming the tensors and the ranks.
    """
    summary = (combined_digest(sent), combined_digest(received))
    summaries = _all_gather(summary)
    if all(digest == summaries[0][0] for pair in summaries for digest in pair):
        return
    tables = _all_gather((dict(sent), dict(received)))
    names = sorted({name for pair in tables for table in pair for name in table})
    lines = [line for name in names if (line := _difference(name, tables))]
    more = len(lines) - MAX_NAMES_SHOWN
    text = "; ".join(lines[:MAX_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    raise WeightSyncError(f"weight sync: {len(lines)} of {len(names)} tensors differ: {text}")


def _difference(name: str, tables: list[tuple[dict[str, str], dict[str, str]]]) -> str:
    """What is wrong with one tensor, or an empty string."""
    reference = next(table[name] for pair in tables for table in pair if name in table)
    faults = []
    for side, verb in ((0, "sent"), (1, "received")):
        absent = [rank for rank, pair in enumerate(tables) if name not in pair[side]]
        other = [rank for rank, pair in enumerate(tables) if name in pair[side] and pair[side][name] != reference]
        if absent:
            faults.append(f"not {verb} on rank {_ranks(absent)}")
        if other:
            faults.append(f"{verb} with other bytes on rank {_ranks(other)}")
    return f"{name} ({', '.join(faults)})" if faults else ""


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _all_gather(value):
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
