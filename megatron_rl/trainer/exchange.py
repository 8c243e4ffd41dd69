"""Completions on their way between ranks: a few flat buffers in place of objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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
