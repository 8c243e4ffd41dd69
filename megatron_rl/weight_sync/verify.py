"""Comparison of the weights sent with the weights received, on every rank; and what one rank knows, made known to all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rl.runtime.digest import (
    PIECE_BYTES,
    ROW_BYTES,
    Kind,
    WeightSyncError,
    changed_spans,
    checksum_bytes,
    combined_digest,
    piece_bytes,
)
from megatron_rl.weight_sync.boxes import ITEMSIZE, slices
from megatron_rl.weight_sync.program import Message
from megatron_rl.weight_sync.schedule import Stream

MAX_NAMES_SHOWN = 8
HALF_UPDATED = "The weights of the rollout engine are half updated: do not sample from it, rebuild it"
Place = tuple[Stream, int]  # (stream, first byte) of a bucket


def agree(
    error: Exception | None, advice: str = "", group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> None:
    """Collective: when any rank has an error, every rank raises it, so that none goes on alone or waits for one that gave up.

    Raises:
        ValueError: there is no ``advice`` and the errors of all ranks that have one are such.
        WeightSyncError: otherwise; also when a rank is gone. Ends with ``advice``.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    try:
        failed = torch.tensor(float(error is not None), device=device)
        dist.all_reduce(failed, group=group)
        if not failed:
            return
        mine = None if error is None else (_text(error, dist.get_rank(group)), isinstance(error, ValueError))
        errors: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, mine, group)
    except RuntimeError as gone:
        text = f"rank {dist.get_rank(group)}: a peer is gone in the middle of the weight sync: {gone}. {advice}"
        raise WeightSyncError(text) from error or gone
    found = [item for item in errors if item is not None]
    kind = ValueError if not advice and all(wrong_input for _, wrong_input in found) else WeightSyncError
    raise kind("; ".join(dict.fromkeys(text for text, _ in found)) + (f". {advice}" if advice else "")) from error


def _text(error: Exception, rank: int) -> str:
    """The message with the rank, unless it begins with it."""
    if str(error).startswith("rank "):
        return str(error)
    kind = "" if isinstance(error, ValueError | WeightSyncError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


def compare(
    messages: Mapping[Place, Message], sums: Mapping[Place, Tensor], kind: Kind, group: dist.ProcessGroup | None = None
) -> None:
    """Collective: every bucket arrived as it was sent. ``messages``, ``sums``: the buckets that this rank sent or was sent, and the
    checksums of their pieces, on the host.

    One digest a stream is exchanged when all is well; the checksums of a stream only when its digests differ, to find the slices.
    Raises WeightSyncError on every rank, naming ranks, tensors and slices.
    """
    places = sorted(sums)
    digests: dict[Stream, xxhash.xxh3_128] = {}
    for place in places:
        digests.setdefault(place[0], xxhash.xxh3_128()).update(memoryview(sums[place].numpy()))
    everyone = _all_gather({stream: digest.hexdigest() for stream, digest in digests.items()}, group)
    wrong = sorted({stream for mine in everyone for stream, digest in mine.items() if everyone[stream[0]][stream] != digest})
    if not wrong:
        return
    rank = dist.get_rank(group)
    sent = _all_gather({place: sums[place].numpy() for place in places if place[0] in wrong and place[0][0] == rank}, group)
    found = []
    for place in places:
        stream = place[0]
        if stream in wrong and stream[1] == rank:
            found += _wrong_boxes(messages[place], torch.from_numpy(sent[stream[0]][place]), sums[place], kind)
    boxes = [box for part in _all_gather(list(dict.fromkeys(found)), group) for box in part]
    shown = "; ".join(boxes[:MAX_NAMES_SHOWN]) + (f"; and {len(boxes) - MAX_NAMES_SHOWN} more" if len(boxes) > MAX_NAMES_SHOWN else "")
    span = PIECE_BYTES if kind == "hash" else ROW_BYTES
    where = f"in {len(boxes)} slices (changes are found to {span} bytes) other bytes arrived than were sent"
    raise WeightSyncError(f"weight sync: {where}: {shown}. {HALF_UPDATED}")


def _wrong_boxes(message: Message, sent: Tensor, received: Tensor, kind: Kind) -> Iterator[str]:
    """The slices of a bucket that differ, with sender and receiver."""
    source, destination, dtype = message.stream
    at, piece = 0, piece_bytes(message.size, kind)
    for begin in range(0, message.size, piece):
        size = min(piece, message.size - begin)
        one, other = (sums[at : at + checksum_bytes(size, kind)] for sums in (sent, received))
        at += checksum_bytes(size, kind)
        for low, high in changed_spans(one, other, size) if not torch.equal(one, other) else ():
            for chunk in message.chunks:
                first, last = (ITEMSIZE[dtype] * element for element in (chunk.begin, chunk.begin + math.prod(chunk.rect[1])))
                if first < begin + high and begin + low < last:
                    yield f"from rank {source} to rank {destination}: {chunk.tensor}{slices(chunk.rect)}"


def verify_tensors(digests: Mapping[str, str]) -> None:
    """Collective: every rank has the same tensors. ``digests``: of each HF-named tensor.

    One digest a rank is exchanged when all is well; the tables only when it is not, to name the tensors.

    Raises:
        WeightSyncError: on every rank, naming the tensors and the ranks.
    """
    if len(set(_all_gather(combined_digest(digests)))) == 1:
        return
    tables = _all_gather(dict(digests))
    names = sorted({name for table in tables for name in table})
    lines = [line for name in names if (line := _difference(name, tables))]
    more = len(lines) - MAX_NAMES_SHOWN
    text = "; ".join(lines[:MAX_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    raise WeightSyncError(f"weight sync: {len(lines)} of {len(names)} tensors differ: {text}")


def _difference(name: str, tables: list[dict[str, str]]) -> str:
    """What is wrong with one tensor, or an empty string."""
    reference = next(table[name] for table in tables if name in table)
    faults = []
    absent = [rank for rank, table in enumerate(tables) if name not in table]
    other = [rank for rank, table in enumerate(tables) if name in table and table[name] != reference]
    if absent:
        faults.append(f"not sent on rank {_ranks(absent)}")
    if other:
        faults.append(f"other bytes on rank {_ranks(other)} than on rank {next(r for r, table in enumerate(tables) if name in table)}")
    return f"{name} ({', '.join(faults)})" if faults else ""


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _all_gather(value, group: dist.ProcessGroup | None = None) -> list:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
