"""Corrections for an engine whose probabilities differ from the trainer's.

Each gives weights of the policy term, detached. gap = old_logprobs - sampler_logprobs, so exp(gap)
is the trainer's old probability of the sampled token over the engine's.
"""

import torch

from megatron_rl.loss.choices import correction
from megatron_rl.loss.per_token.terms import Terms
from megatron_rl.loss.shapes import PerToken


@correction("tis")
def truncated_importance(gap: PerToken, *, cap: float) -> PerToken:
    """w = min(exp(gap), cap), per token. Source: Yao et al. 2025, truncated importance sampling."""
    return gap.detach().exp().clamp(max=cap)


@correction("icepop")
def icepop(gap: PerToken, *, cap: float) -> PerToken:
    """w = exp(gap) where 1/cap <= exp(gap) <= cap, else 0.

    Source: IcePop (Ring-1T report, arXiv 2510.18855).
    """
    weight = gap.detach().exp()
    return torch.where((weight >= 1 / cap) & (weight <= cap), weight, torch.zeros_like(weight))


@correction("sequence_mask")
def sequence_mask(gap: PerToken, terms: Terms, *, cap: float) -> PerToken:
    """1 where the geometric-mean ratio of the response, exp(mean gap), is in [1/cap, cap], else 0.

    A response is kept or dropped as a whole: the tokens behind a strange one are strange too.
    """
    mean = terms.response_mean(gap.detach()).exp()
    return ((mean >= 1 / cap) & (mean <= cap)).to(gap.dtype)
