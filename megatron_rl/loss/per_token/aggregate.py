"""From per-token losses to one number: the weight of each loss token.

All denominators are those of the whole minibatch (one optimizer step, all ranks), so that the
contributions of micro-batches and ranks only have to be added.
"""

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from megatron_rl.loss.choices import aggregation
from megatron_rl.loss.shapes import PerToken, ResponseCounts, Scalar, TokenIndex, TokenMask
from megatron_rl.loss.whole_responses import WholeResponses, num_up_to_quantile


@aggregation
def seq_mean_token_mean(
    num_responses: int,
    response_loss_tokens: ResponseCounts,
    response_index: TokenIndex,
    dtype: torch.dtype,
) -> PerToken:
    """1 / (num_responses L_i), L_i loss tokens of the response: mean over means.

    Source: GRPO (arXiv 2402.03300) eq. 3.
    """
    per_response = 1 / response_loss_tokens.clamp(min=1).to(dtype)
    return per_response[response_index] / max(num_responses, 1)


@aggregation
def token_mean(num_tokens: int, response_index: TokenIndex, dtype: torch.dtype) -> PerToken:
    """1 / num_tokens: every loss token of the minibatch counts the same.

    Source: DAPO (arXiv 2503.14476) eq. 8.
    """
    return _constant(1 / max(num_tokens, 1), response_index, dtype)


@aggregation
def seq_mean_token_sum(
    num_responses: int, response_index: TokenIndex, dtype: torch.dtype
) -> PerToken:
    """1 / num_responses: sum over a response, mean over responses."""
    return _constant(1 / max(num_responses, 1), response_index, dtype)


@aggregation
def seq_mean_token_sum_norm(
    num_responses: int,
    response_limit: int | None,
    response_index: TokenIndex,
    dtype: torch.dtype,
    *,
    norm_len: PositiveInt | None = None,
) -> PerToken:
    """1 / (num_responses norm_len), a constant length; null is the response limit.

    Source: Dr. GRPO (arXiv 2503.20783), its released code; the paper drops the length altogether.
    """
    divisor = norm_len or response_limit
    if divisor is None:
        raise ValueError(
            "aggregate.norm_len is null: seq_mean_token_sum_norm divides by it; set it or pass"
            " response_limit"
        )
    return seq_mean_token_sum(num_responses, response_index, dtype) / divisor


@aggregation
def token_mean_by_entropy(
    entropy: PerToken,
    responses: WholeResponses,
    response_loss_tokens: ResponseCounts,
    *,
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.8,
    reasoning: NonNegativeFloat = 0.0,
) -> PerToken:
    """1 / (low-entropy tokens), and reasoning / (reasoning tokens) at those: a mean over each set.

    A token is one of reasoning where its entropy is above the quantile of its response. How many
    there are in the minibatch follows from lengths, as if no two entropies of a response were
    equal: known before any token is seen, it is the same for every cut into micro-batches.
    Source: the KL term of Archer (arXiv 2507.15778), its released code.
    """
    num_low = num_up_to_quantile(response_loss_tokens, quantile).sum()
    num_high = response_loss_tokens.sum() - num_low
    of_low, of_high = (1 / num.clamp(min=1).to(entropy.dtype) for num in (num_low, num_high))
    reasons = entropy > responses.quantile(entropy, quantile)
    return torch.where(reasons, reasoning * of_high, of_low)


def weighted_sum(values: PerToken, weights: PerToken, loss_mask: TokenMask) -> Scalar:
    """sum of values weights over the mask; 0 for an empty mask.

    A value outside the mask is never used, NaN included.
    """
    return (values * weights).masked_fill(~loss_mask, 0).sum()


def _constant(weight: float, response_index: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(response_index.shape, weight, dtype=dtype, device=response_index.device)
