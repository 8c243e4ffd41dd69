"""Ragged token lists as one flat batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.types import SequenceBatch


def sequence_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_ids: Tensor | None = None) -> SequenceBatch:
    """The batch of (prompt token ids, response token ids) pairs, in the order given, int64 on CPU; ``prompt_ids`` as there.

    Example: ``sequence_batch([((5, 6), (7,)), ((5,), (8, 9))])`` has ``token_ids=[5,6,7, 5,8,9]``, ``prompt_lengths=[2,1]``,
    ``response_lengths=[1,2]``.
    """
    assert all(len(prompt) > 0 for prompt, _ in pairs), "a response needs a prompt: its first token is predicted from it"
    parts = [np.empty(0, dtype=np.int64)]
    last, converted = None, parts[0]
    for prompt, response in pairs:
        # The prompt of a group is one object: its tokens are read once.
        if prompt is not last:
            last, converted = prompt, np.asarray(prompt, dtype=np.int64)
        parts += [converted, np.asarray(response, dtype=np.int64)]
    return SequenceBatch(
        token_ids=torch.from_numpy(np.concatenate(parts)),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.int64),
        response_lengths=torch.tensor([len(response) for _, response in pairs], dtype=torch.int64),
        prompt_ids=prompt_ids,
    )
