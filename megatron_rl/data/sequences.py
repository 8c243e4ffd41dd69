"""Ragged token lists as one flat batch."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from megatron_rl.types import Image, SequenceBatch

TokenIds = Sequence[int] | Int[np.ndarray, " _"]  # each of a length of its own


def sequence_batch(
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    prompt_index: Tensor | None = None,
    images: Sequence[tuple[Image, ...]] = (),
) -> SequenceBatch:
    """The batch of (prompt token ids, response token ids) pairs, in the order given, int64 on CPU;
    ``prompt_index`` and ``images`` as there, and no images where there is none at all.

    Example: ``sequence_batch([((5, 6), (7,)), ((5,), (8, 9))])`` has ``token_ids=[5,6,7, 5,8,9]``,
    ``prompt_lengths=[2,1]``, ``response_lengths=[1,2]``.
    """
    assert all(len(prompt) > 0 for prompt, _ in pairs), (
        "a response needs a prompt: its first token is predicted from it"
    )
    prompt_lengths = [len(prompt) for prompt, _ in pairs]
    response_lengths = [len(response) for _, response in pairs]
    # Written in place: token ids of 32 bits become those of 64 without a copy in between.
    token_ids = np.empty(sum(prompt_lengths) + sum(response_lengths), dtype=np.int64)
    end = 0
    previous: TokenIds | None = None
    prompt_ids = token_ids[:0]
    for prompt, response in pairs:
        # The prompt of a group is one object: its tokens are read once.
        if prompt is not previous:
            previous = prompt
            prompt_ids = np.asarray(prompt, dtype=np.int64)
        for ids in (prompt_ids, response):
            start = end
            end += len(ids)
            token_ids[start:end] = ids
    return SequenceBatch(
        token_ids=torch.from_numpy(token_ids),
        prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.int64),
        response_lengths=torch.tensor(response_lengths, dtype=torch.int64),
        prompt_index=prompt_index,
        images=tuple(images) if any(images) else None,
    )
