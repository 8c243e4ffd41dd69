"""One more token behind every response: what the policy is given, and how it is taken apart."""

from __future__ import annotations

import torch

from megatron_rl.data.sequences import sequence_batch
from megatron_rl.passes import LocalBatch, TokenScores, TokenView
from megatron_rl.signals.end_token import EndTokens
from megatron_rl.signals.masked_images import MaskedCopies

# Two responses, of one token and of three.
BATCH = sequence_batch([((5, 6), (7,)), ((5,), (8, 9, 4))], torch.tensor([0, 1]))
ENDS = EndTokens.of(LocalBatch(BATCH, [[1], [0]], torch.tensor([5, 7])), 3)


def test_the_token_stands_behind_each_response_by_hand() -> None:
    share = ENDS.batch
    assert share.batch.token_ids.tolist() == [5, 6, 7, 3, 5, 8, 9, 4, 3]
    assert share.batch.prompt_lengths.tolist() == [2, 1]
    assert share.batch.response_lengths.tolist() == [2, 4]
    assert share.microbatches == [[1], [0]]
    assert BATCH.response_lengths.tolist() == [1, 3]


def test_scores_are_of_the_responses_alone_by_hand() -> None:
    values = torch.arange(6.0)
    found = ENDS.without(TokenScores(values, {"entropy": -values}))
    assert found.logprobs.tolist() == [0, 2, 3, 4]
    assert found.columns["entropy"].tolist() == [0, -2, -3, -4]


def test_a_view_is_taken_apart_by_hand() -> None:
    """Places 3, 5 and 1 of the longer layout: the second token of the second response, and what is
    behind the second and the first."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    topk = torch.tensor([[-0.1], [-0.2], [-0.3]])
    view = TokenView(torch.tensor([3, 5, 1]), logprobs, {"topk_logprobs": topk})
    plain, others = ENDS.split(view)
    assert plain.index.tolist() == [2]  # of 7 | 8 9 4
    assert plain.logprobs.tolist() == [-1]
    torch.testing.assert_close(plain.columns["topk_logprobs"], topk[:1])
    ends = others["end_logprobs"]
    assert ends.tolist() == [-2, -3] and others["end_index"].tolist() == [7, 5]
    (plain.logprobs.sum() + 2 * ends.sum()).backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [1, 2, 2]


def test_the_end_of_a_masked_copy_is_in_no_loss() -> None:
    """Both extensions, as an update nests them: two responses of one and three tokens, behind each
    its end, and copies of all six."""
    copies = MaskedCopies.of(ENDS.batch, 0.6, 9)
    logprobs = -torch.arange(12.0)
    view, none = copies.split(TokenView(torch.arange(12), logprobs))
    plain, others = ENDS.split(view)
    assert none == {} and plain.index.tolist() == [0, 1, 2, 3]
    assert plain.logprobs.tolist() == [0, -2, -3, -4]
    assert plain.columns["masked_logprobs"].tolist() == [-6, -8, -9, -10]
    assert others["end_logprobs"].tolist() == [-1, -5]
