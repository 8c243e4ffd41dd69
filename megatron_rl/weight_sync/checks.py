"""The weights received are those that were sent: compared on every rank."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import torch.distributed as dist
import xxhash
from torch import Tensor

from megatron_rl.errors import WeightSyncError, first_few
from megatron_rl.runtime.digest import combined_digest
from megatron_rl.weight_sync.collectives import all_gather
from megatron_rl.weight_sync.failure import HALF_UPDATED
from megatron_rl.weight_sync.planner.program import Message
from megatron_rl.weight_sync.planner.schedule import BucketId, Stream


def compare(
    messages: Mapping[BucketId, Message],
    checksums: Mapping[BucketId, Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: every bucket arrived as it was sent. ``messages``, ``checksums``: the buckets
    that this rank sent or was sent, and their checksums, on the host.

    One digest a stream is exchanged when all is well; those of its buckets only when it differs at
    the two ends.
    Raises WeightSyncError on every rank, naming ranks, and the tensors and slices of the buckets.
    """
    buckets = {
        bucket: xxhash.xxh3_128_hexdigest(memoryview(checksums[bucket].numpy()))
        for bucket in sorted(checksums)  # the order in which both ends digest a stream
    }
    of_stream: dict[Stream, list[str]] = defaultdict(list)
    for bucket, digest in buckets.items():
        of_stream[bucket.stream].append(digest)
    own = [
        (stream, xxhash.xxh3_128_hexdigest("".join(of).encode()))
        for stream, of in of_stream.items()
    ]
    everyone = [dict(pairs) for pairs in all_gather(own, list[tuple[Stream, str]], group)]
    # Each stream is there twice, from its source and from its target.
    pairs = chain.from_iterable(of_rank.items() for of_rank in everyone)
    wrong = {stream for stream, digest in pairs if everyone[stream.source][stream] != digest}
    if not wrong:
        return
    rank = dist.get_rank(group)
    sent = [each for each in buckets.items() if each[0].stream in wrong]
    from_all = [dict(pairs) for pairs in all_gather(sent, list[tuple[BucketId, str]], group)]
    places = [
        f"from rank {bucket.stream.source} to rank {rank}: {messages[bucket].contents}"
        for bucket, digest in sent
        if bucket.stream.target == rank and from_all[bucket.stream.source][bucket] != digest
    ]
    every_place = list(chain.from_iterable(all_gather(places, list[str], group)))
    raise WeightSyncError(
        f"weight sync: in {len(every_place)} messages other bytes arrived than were sent:"
        f" {'; '.join(first_few(every_place))}. {HALF_UPDATED}"
    )


def verify_tensors(digests: Mapping[str, str]) -> None:
    """Collective: every rank has the same tensors. ``digests``: of each HF-named tensor.

    A digest a rank is exchanged when all is well; the tables when it is not, to name the tensors.

    Raises:
        WeightSyncError: on every rank, naming the tensors and the ranks.
    """
    if len(set(all_gather(combined_digest(digests), str))) == 1:
        return
    tables = all_gather(dict(digests), dict[str, str])
    names = sorted(set().union(*tables))
    differences = []
    for name in names:
        ranks: dict[str | None, list[int]] = defaultdict(list)
        for rank, table in enumerate(tables):
            ranks[table.get(name)].append(rank)
        absent = ranks.pop(None, [])
        (first, *_), *others = ranks.values()  # in the order of ranks
        other = sorted(chain.from_iterable(others))
        faults = [f"not sent on rank {_ranks(absent)}"] if absent else []
        if other:
            faults.append(f"other bytes on rank {_ranks(other)} than on rank {first}")
        if faults:
            differences.append(f"{name} ({', '.join(faults)})")
    raise WeightSyncError(
        f"weight sync: {len(differences)} of {len(names)} tensors differ: "
        + "; ".join(first_few(differences))
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
