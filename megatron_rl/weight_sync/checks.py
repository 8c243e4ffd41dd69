"""The weights received are those that were sent: compared on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rl.errors import WeightSyncError
from megatron_rl.runtime.digest import (
    PIECE_BYTES,
    ROW_BYTES,
    Kind,
    changed_spans,
    checksum_bytes,
    combined_digest,
    piece_bytes,
)
from megatron_rl.weight_sync.collectives import all_gather
from megatron_rl.weight_sync.failure import HALF_UPDATED
from megatron_rl.weight_sync.planner.program import Message
from megatron_rl.weight_sync.planner.schedule import BucketId, Stream
from megatron_rl.weight_sync.planner.shards import ITEMSIZE
from megatron_rl.weight_sync.planner.slices import slice_text

MAX_NAMES_SHOWN = 8


def compare(
    messages: Mapping[BucketId, Message],
    checksums: Mapping[BucketId, Tensor],
    kind: Kind,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: every bucket arrived as it was sent. ``messages``, ``checksums``: the buckets
    that this rank sent or was sent, and the checksums of their pieces, on the host.

    One digest a stream is exchanged when all is well; the checksums of a stream only when its
    digests differ, to find the slices.
    Raises WeightSyncError on every rank, naming ranks, tensors and slices.
    """
    wrong = _wrong_streams(checksums, group)
    if not wrong:
        return
    rank = dist.get_rank(group)
    own = [
        (bucket, sums.numpy().tobytes().hex())
        for bucket, sums in checksums.items()
        if bucket.stream in wrong and bucket.stream.source == rank
    ]
    everyone = all_gather(own, list[tuple[BucketId, str]], group)
    sent_by = [dict(of_rank) for of_rank in everyone]
    places: list[str] = []
    for bucket in sorted(checksums):
        if bucket.stream in wrong and bucket.stream.target == rank:
            sums = bytearray.fromhex(sent_by[bucket.stream.source][bucket])
            sent = torch.frombuffer(sums, dtype=checksums[bucket].dtype)
            places += _wrong_places(messages[bucket], sent, checksums[bucket], kind)
    places = list(dict.fromkeys(places))
    every_place: list[str] = []
    for of_rank in all_gather(places, list[str], group):
        every_place += of_rank
    span = PIECE_BYTES if kind == "hash" else ROW_BYTES
    raise WeightSyncError(
        f"weight sync: in {len(every_place)} slices (changes are found to {span} bytes) other bytes"
        f" arrived than were sent: {_shown(every_place)}. {HALF_UPDATED}"
    )


def _wrong_streams(
    checksums: Mapping[BucketId, Tensor], group: dist.ProcessGroup | None
) -> set[Stream]:
    """Collective: the streams whose two ends have different digests."""
    digests: dict[Stream, xxhash.xxh3_128] = {}
    for bucket in sorted(checksums):  # the order in which both ends digest a stream
        digest = digests.setdefault(bucket.stream, xxhash.xxh3_128())
        digest.update(memoryview(checksums[bucket].numpy()))
    own = [(stream, digest.hexdigest()) for stream, digest in digests.items()]
    everyone = [dict(pairs) for pairs in all_gather(own, list[tuple[Stream, str]], group)]
    wrong = set()
    for of_rank in everyone:  # each stream is there twice, from its source and from its target
        for stream, digest in of_rank.items():
            if everyone[stream.source][stream] != digest:
                wrong.add(stream)
    return wrong


def _wrong_places(message: Message, sent: Tensor, received: Tensor, kind: Kind) -> Iterator[str]:
    """The slices of a bucket that differ, with sender and receiver."""
    at = 0  # where the checksum of the piece begins
    piece = piece_bytes(message.size, kind)
    for begin in range(0, message.size, piece):
        size = min(piece, message.size - begin)
        end = at + checksum_bytes(size, kind)
        if not torch.equal(sent[at:end], received[at:end]):
            for low, high in changed_spans(sent[at:end], received[at:end], size):
                yield from _places(message, begin + low, begin + high)
        at = end


def _places(message: Message, low: int, high: int) -> Iterator[str]:
    """What lies in bytes ``[low, high)`` of the bucket."""
    itemsize = ITEMSIZE[message.stream.dtype]
    for chunk in message.chunks:
        first = itemsize * chunk.begin
        last = first + itemsize * math.prod(chunk.region.shape)
        if first < high and low < last:
            yield (
                f"from rank {message.stream.source} to rank {message.stream.target}:"
                f" {chunk.tensor}{slice_text(chunk.region)}"
            )


def verify_tensors(digests: Mapping[str, str]) -> None:
    """Collective: every rank has the same tensors. ``digests``: of each HF-named tensor.

    One digest a rank is exchanged when all is well; the tables only when it is not, to name the
    tensors.

    Raises:
        WeightSyncError: on every rank, naming the tensors and the ranks.
    """
    if len(set(all_gather(combined_digest(digests), str))) == 1:
        return
    tables = all_gather(dict(digests), dict[str, str])
    names = sorted(set().union(*tables))
    described = [_difference(name, tables) for name in names]
    differences = [text for text in described if text]
    raise WeightSyncError(
        f"weight sync: {len(differences)} of {len(names)} tensors differ: {_shown(differences)}"
    )


def _difference(name: str, tables: Sequence[Mapping[str, str]]) -> str:
    """What is wrong with one tensor, or an empty string."""
    absent = [rank for rank, table in enumerate(tables) if name not in table]
    present = [rank for rank, table in enumerate(tables) if name in table]
    first = present[0]
    other = [rank for rank in present if tables[rank][name] != tables[first][name]]
    faults = []
    if absent:
        faults.append(f"not sent on rank {_ranks(absent)}")
    if other:
        faults.append(f"other bytes on rank {_ranks(other)} than on rank {first}")
    if not faults:
        return ""
    return f"{name} ({', '.join(faults)})"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _shown(entries: Sequence[str]) -> str:
    """The first entries, and how many more there are."""
    text = "; ".join(entries[:MAX_NAMES_SHOWN])
    more = len(entries) - MAX_NAMES_SHOWN
    if more > 0:
        text += f"; and {more} more"
    return text
