"""Completions and token rows on their way between ranks: a few flat buffers in place of objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.token_rows import TokenRows
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.ownership import Route
from megatron_rl.types import Completion


@dataclass(frozen=True)
class FlatCompletions:
    """Groups of completions, the tokens of all end to end. Pickled, a token takes 8 bytes.

    Example, two groups with one completion of two tokens and one of three: ``group_sizes=[1, 1]``,
    ``lengths=[2, 3]``, ``token_ids=[9, 2, 5, 6, 2]``.
    """

    group_sizes: array[int]
    lengths: array[int]
    truncated: array[int]
    weight_versions: array[int]
    token_ids: array[int]
    sampler_logprobs: array[float]

    def groups(self) -> list[list[Completion]]:
        """The inverse of ``flattened``."""
        result: list[list[Completion]] = []
        row = first = 0
        for size in self.group_sizes:
            group: list[Completion] = []
            for _ in range(size):
                last = first + self.lengths[row]
                group.append(
                    Completion(
                        self.token_ids[first:last],
                        self.sampler_logprobs[first:last],
                        bool(self.truncated[row]),
                        self.weight_versions[row],
                    )
                )
                row += 1
                first = last
            result.append(group)
        return result


def flattened(groups: Sequence[Sequence[Completion]]) -> FlatCompletions:
    """``groups`` as they travel."""
    flat = FlatCompletions(array("i"), array("i"), array("b"), array("q"), array("i"), array("f"))
    for group in groups:
        flat.group_sizes.append(len(group))
        for completion in group:
            flat.lengths.append(len(completion.token_ids))
            flat.truncated.append(completion.truncated)
            flat.weight_versions.append(completion.weight_version)
            flat.token_ids.extend(completion.token_ids)
            flat.sampler_logprobs.extend(completion.sampler_logprobs)
    return flat


def token_rows(first_row: int, completions: Sequence[Completion]) -> TokenRows:
    """The rows that were sampled here, numbered from ``first_row``; columns ``token_ids`` (int32)
    and ``sampler_logprobs`` (float32)."""
    ids = [np.asarray(completion.token_ids, dtype=np.int32) for completion in completions]
    logprobs = [
        np.asarray(completion.sampler_logprobs, dtype=np.float32) for completion in completions
    ]
    return TokenRows(
        rows=np.arange(first_row, first_row + len(completions)),
        lengths=np.array([len(values) for values in ids], dtype=np.int64),
        columns={
            "token_ids": np.concatenate([np.empty(0, np.int32), *ids]),
            "sampler_logprobs": np.concatenate([np.empty(0, np.float32), *logprobs]),
        },
    )


def exchange_rows(held: TokenRows, route: Route, world: World) -> TokenRows:
    """Collective: the rows whose target is this rank, by source and there in canonical order.

    Each row goes to its target alone. Sizes follow from the route, so nothing but values travels:
    8 bytes a token for 32-bit ids and logprobs. All ranks hold columns of the same names and
    dtypes, in the same order, also those without a row.
    """
    outgoing = held.take(route.outgoing(world.rank))
    if world.size == 1:
        return outgoing
    incoming = route.incoming(world.rank)
    sent = route.tokens_to(world.rank, world.size)
    received = route.tokens_from(world.rank, world.size)
    columns = {}
    for name, values in outgoing.columns.items():
        buffer = torch.from_numpy(np.empty(sum(received), dtype=values.dtype))
        with world.attendance.collective() if world.attendance else nullcontext():
            dist.all_to_all_single(
                buffer, torch.from_numpy(values), received, sent, group=world.control_group
            )
        columns[name] = buffer.numpy()
    return TokenRows(incoming, route.lengths[incoming], columns)
