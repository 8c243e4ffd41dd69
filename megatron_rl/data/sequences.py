"""Ragged token lists as one flat batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from megatron_rl.types import SequenceBatch


def sequence_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], prompt_ids: Tensor | None = None) -> SequenceBatch:
    """The batch of (prompt token ids, response token ids) pairs, in the order given, int64 on CPU; ``prompt_ids`` as there.

    Example: ``sequence_batch([((5, 6), (7,)), ((5,), (8, 9))])`` has ``token_ids=[5,6,7, 5,8,9]``, ``prompt_lengths=[2,1]``,
    ``response_lengths=[1,2]``.
    """
    assert all(len(prompt) > 0 for prompt, _ in pairs), "a response needs a prompt: its first token is predicted from it"
    return SequenceBatch(
        token_ids=torch.tensor(list(chain.from_iterable((*prompt, *response) for prompt, response in pairs)), dtype=torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.int64),
        response_lengths=torch.tensor([len(response) for _, response in pairs], dtype=torch.int64),
        prompt_ids=prompt_ids,
    )
