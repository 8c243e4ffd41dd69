"""The import hook of conftest.py really executes annotations: a wrong dtype or shape raises at the
call."""

import pytest
import torch
from jaxtyping import TypeCheckError

from megatron_rl.passes import TokenScores
from megatron_rl.types import SequenceBatch


def test_a_wrong_dtype_raises():
    with pytest.raises(TypeCheckError):
        TokenScores(logprobs=torch.zeros(3, dtype=torch.int64))


def test_two_different_sizes_under_one_name_raise():
    """``responses`` must have one size in both vectors."""
    with pytest.raises(TypeCheckError):
        SequenceBatch(
            token_ids=torch.arange(6),
            prompt_lengths=torch.tensor([2, 1]),
            response_lengths=torch.tensor([1, 1, 1]),
        )
