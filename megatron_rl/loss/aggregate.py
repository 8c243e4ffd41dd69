"""From per-token losses to one number: the weight of each loss token.

All denominators are those of the whole minibatch (one optimizer step, all ranks), so that the
contributions of micro-batches and ranks only have to be added.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from pydantic import PositiveInt
from torch import Tensor

from megatron_rl.loss.choices import aggregation


@aggregation
def seq_mean_token_mean(
    num_responses: int,
    response_loss_tokens: Int[Tensor, " responses"],
    response_index: Int[Tensor, " tokens"],
    dtype: torch.dtype,
) -> Float[Tensor, " tokens"]:
    """1 / (num_responses L_i), L_i loss tokens of the response: mean over means.

    Source: GRPO (arXiv 2402.03300) eq. 3.
    """
    per_response = 1 / response_loss_tokens.clamp(min=1).to(dtype)
    return per_response[response_index] / max(num_responses, 1)


@aggregation
def token_mean(
    num_tokens: int, response_index: Int[Tensor, " tokens"], dtype: torch.dtype
) -> Float[Tensor, " tokens"]:
    """1 / num_tokens: every loss token of the minibatch counts the same.

    Source: DAPO (arXiv 2503.14476) eq. 8.
    """
    return _constant(1 / max(num_tokens, 1), response_index, dtype)


@aggregation
def seq_mean_token_sum(
    num_responses: int, response_index: Int[Tensor, " tokens"], dtype: torch.dtype
) -> Float[Tensor, " tokens"]:
    """1 / num_responses: sum over a response, mean over responses."""
    return _constant(1 / max(num_responses, 1), response_index, dtype)


@aggregation
def seq_mean_token_sum_norm(
    num_responses: int,
    response_limit: int | None,
    response_index: Int[Tensor, " tokens"],
    dtype: torch.dtype,
    *,
    norm_len: PositiveInt | None = None,
) -> Float[Tensor, " tokens"]:
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


def weighted_sum(
    values: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    loss_mask: Bool[Tensor, " tokens"],
) -> Float[Tensor, ""]:
    """sum of values weights over the mask; 0 for an empty mask.

    A value outside the mask is never used, NaN included.
    """
    return (values * weights).masked_fill(~loss_mask, 0).sum()


def _constant(weight: float, response_index: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(response_index.shape, weight, dtype=dtype, device=response_index.device)
