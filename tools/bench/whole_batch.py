"""A batch on every rank, as trainers without owners have it.

tools/bench/data_plane.py compares owned rows with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.types import Completion, Prompt, SequenceBatch


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


def whole_batch(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> tuple[SequenceBatch, torch.Tensor]:
    """All sequences, and the sampler's logprobs of all response tokens."""
    pairs = [
        (prompt.token_ids, completion.token_ids)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    logprobs = [
        np.asarray(completion.sampler_logprobs, dtype=np.float32)
        for group in groups
        for completion in group
    ]
    return sequence_batch(pairs), torch.from_numpy(np.concatenate(logprobs))


def mismatch(old: torch.Tensor, sampler: torch.Tensor) -> list[float]:
    """The figures of mismatch/ over all tokens at once."""
    difference = (old - sampler).double()
    distance = difference.abs()
    excess = difference.exp() - difference - 1
    return [
        distance.mean().item(),
        distance.max().item(),
        difference.exp().mean().item(),
        excess.mean().item(),
    ]
