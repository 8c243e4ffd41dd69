"""From per-token losses to one number: the weight of each loss token, by denominators of the whole minibatch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def token_mean(num_tokens: int, response_ids: Int[Tensor, " tokens"], dtype: torch.dtype) -> Float[Tensor, " tokens"]:
    """1 / num_tokens: every loss token of the minibatch counts the same. Source: DAPO (arXiv 2503.14476) eq. 8."""
    return torch.full(response_ids.shape, 1 / max(num_tokens, 1), dtype=dtype, device=response_ids.device)


def seq_mean_token_mean(
    num_responses: int, response_loss_tokens: Int[Tensor, " responses"], response_ids: Int[Tensor, " tokens"], dtype: torch.dtype
) -> Float[Tensor, " tokens"]:
    """1 / (num_responses L_i), L_i loss tokens of the response. Source: GRPO (arXiv 2402.03300) eq. 3."""
    per_response = 1 / response_loss_tokens.clamp(min=1).to(dtype)
    return per_response[response_ids] / max(num_responses, 1)


def seq_mean_token_sum(num_responses: int, response_ids: Int[Tensor, " tokens"], dtype: torch.dtype) -> Float[Tensor, " tokens"]:
    """1 / num_responses: sum over a response, mean over responses."""
    return torch.full(response_ids.shape, 1 / max(num_responses, 1), dtype=dtype, device=response_ids.device)


def seq_mean_token_sum_norm(
    num_responses: int, norm_len: int, response_ids: Int[Tensor, " tokens"], dtype: torch.dtype
) -> Float[Tensor, " tokens"]:
    """1 / (num_responses norm_len), a constant length. Source: Dr. GRPO (arXiv 2503.20783), its released code; the paper
    drops the length altogether."""
    return seq_mean_token_sum(num_responses, response_ids, dtype) / norm_len


def weighted_sum(
    values: Float[Tensor, " tokens"], weights: Float[Tensor, " tokens"], loss_mask: Bool[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    """sum of values weights over the mask; 0 for an empty mask. A value outside the mask is never used, NaN included."""
    return (values * weights).masked_fill(~loss_mask, 0).sum()
