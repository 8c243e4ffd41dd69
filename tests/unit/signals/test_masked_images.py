"""Responses once more behind masked images: what the policy is given, and how it is taken apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.config.method import load_method
from megatron_rl.data.multimodal.masks import MaskedImage, masked
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.passes import LocalBatch, TokenScores, TokenView
from megatron_rl.signals import signals_of
from megatron_rl.signals.masked_images import MaskedCopies, mask_seed, with_masked_images
from megatron_rl.types import Image, Prompt
from tests.unit.trainer.runs import bandit_config

CAT = Image("c" * 64, 56, 56, b"cat")
DOG = Image("d" * 64, 28, 28, b"dog")
# Two responses to a prompt with two images, of one token and of three; one to a prompt without.
BATCH = sequence_batch(
    [((5, 6), (7,)), ((5, 6), (8, 9, 4)), ((5,), (3,))],
    torch.tensor([0, 0, 1]),
    [(CAT, DOG), (CAT, DOG), ()],
)

COPIES = MaskedCopies.of(LocalBatch(BATCH, [[0, 1, 2]]), 0.6, 9)


def test_copies_stand_behind_all_plain_rows_by_hand() -> None:
    made = MaskedCopies.of(LocalBatch(BATCH, [[2], [0, 1], []]), 0.6, 9).batch
    both = made.batch
    assert both.token_ids.tolist() == 2 * [5, 6, 7, 5, 6, 8, 9, 4, 5, 3]
    assert both.prompt_lengths.tolist() == 2 * [2, 2, 1]
    assert both.response_lengths.tolist() == 2 * [1, 3, 1]
    assert both.prompt_index is not None and both.prompt_index.tolist() == [0, 0, 1, 2, 2, 3]
    hidden = (masked(CAT, 0.6, 9), masked(DOG, 0.6, 9))
    assert both.images == ((CAT, DOG), (CAT, DOG), (), hidden, hidden, ())
    assert made.microbatches == [[2, 5], [0, 1, 3, 4], []]


def test_a_batch_without_rows_or_images_has_copies_too() -> None:
    """A rank may have no row of a minibatch, or none with an image."""
    empty = sequence_batch([], torch.zeros(0, dtype=torch.int64))
    assert MaskedCopies.of(LocalBatch(empty, [[]]), 0.6, 9).batch.batch.num_responses == 0
    text = sequence_batch([((5,), (3,))])
    both = MaskedCopies.of(LocalBatch(text, [[0]], torch.tensor([4])), 0.6, 9).batch
    assert both.rows is not None and both.rows.tolist() == [4, 4]
    assert both.batch.images is None and both.batch.prompt_index is None
    assert both.batch.token_ids.tolist() == [5, 3, 5, 3] and both.microbatches == [[0, 1]]


def test_a_copy_has_the_temperatures_of_its_tokens() -> None:
    temperatures = torch.tensor([1.0, 1.0, 0.9, 0.8, 1.0])
    share = LocalBatch(replace(BATCH, temperatures=temperatures), [[0, 1, 2]])
    both = MaskedCopies.of(share, 0.6, 9).batch.batch
    torch.testing.assert_close(both.temperatures, torch.cat([temperatures, temperatures]))


def test_masked_images_alone_leave_rows_and_micro_batches() -> None:
    share = with_masked_images(LocalBatch(BATCH, [[2], [0, 1]]), 0.6, 9)
    assert share.batch.images is not None and share.microbatches == [[2], [0, 1]]
    assert all(isinstance(each, MaskedImage) for row in share.batch.images for each in row)
    assert share.batch.token_ids is BATCH.token_ids


def test_a_view_is_taken_apart_by_hand() -> None:
    """Tokens 3 and 4 of five, then their copies."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    topk = torch.tensor([[-0.1], [-0.2], [-0.3], [-0.4]])
    index = torch.tensor([3, 4, 8, 9])
    plain, others = COPIES.split(TokenView(index, logprobs, {"topk_logprobs": topk}))
    assert others == {} and plain.columns.keys() == {"topk_logprobs", "masked_logprobs"}
    masked_logprobs = plain.columns["masked_logprobs"]
    assert plain.index.tolist() == [3, 4]
    assert plain.logprobs.tolist() == [-1, -2] and masked_logprobs.tolist() == [-3, -4]
    torch.testing.assert_close(plain.columns["topk_logprobs"], topk[:2])
    (plain.logprobs.sum() + 2 * masked_logprobs.sum()).backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [1, 1, 2, 2]


def test_copies_that_are_of_other_tokens_are_noticed() -> None:
    view = TokenView(torch.tensor([3, 4, 8, 7]), torch.zeros(4))
    with pytest.raises(AssertionError, match="different ranks"):
        COPIES.split(view)


def test_scores_are_of_the_plain_rows_by_hand() -> None:
    values = torch.arange(10.0)
    found = COPIES.without(TokenScores(values, {"entropy": -values}))
    assert found.logprobs.tolist() == [0, 1, 2, 3, 4]
    assert found.columns["entropy"].tolist() == [0, -1, -2, -3, -4]


def test_masks_differ_by_step_and_seed() -> None:
    assert mask_seed(1, 2) == mask_seed(1, 2)
    assert len({mask_seed(1, 2), mask_seed(1, 3), mask_seed(2, 2), mask_seed(2, 1)}) == 4


def test_data_without_images_is_refused(tmp_path: Path) -> None:
    text = Prompt("train:1", (5,), "1", "toy")
    seen = Prompt("train:2", (5,), "1", "toy", images=(CAT,))
    config = bandit_config(tmp_path, ["method=papo"])
    papo = signals_of(load_method("papo"))
    with pytest.raises(ValueError, match=r"method papo masks .* no prompt of data\.train has one"):
        papo.check([text], config)
    papo.check([text, seen], config)
