"""From the tokens of a micro-batch to its contribution to the minibatch loss."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.knobs import Named
from megatron_rl.loss.batch import LossOutput, Reading, TokenBatch
from megatron_rl.loss.choices import AGGREGATIONS, CORRECTIONS, POLICY_LOSSES, TOKEN_SHAPERS
from megatron_rl.loss.config import MethodConfig, MismatchConfig
from megatron_rl.loss.per_token import kl
from megatron_rl.loss.per_token.aggregate import weighted_sum
from megatron_rl.loss.per_token.response_losses import Clipped
from megatron_rl.loss.per_token.terms import SequenceSum, Terms, terms_of
from megatron_rl.loss.segments import where_correct
from megatron_rl.loss.shapes import PerToken, Scalar
from megatron_rl.loss.whole_responses import SequenceGather


def token_reads(config: MethodConfig) -> Iterator[tuple[str, Reading]]:
    """Columns of TokenBatch and the reference's logprobs that a method reads, with readers."""
    for shaper in config.token_shaping.values():
        yield from TOKEN_SHAPERS.readings(shaper)
    for aggregate in (config.aggregate, config.kl.aggregate):
        if aggregate is not None:
            yield from AGGREGATIONS.readings(aggregate)
    yield from POLICY_LOSSES.readings(config.policy_loss)
    if config.entropy.coef:
        yield "entropy", Reading("entropy.coef", {"gradient": True})
    for name, term in config.extra_terms.items():
        for column in term.reads:
            yield column, Reading(name, term.model_dump())
    if config.kl.in_loss:
        yield "ref_logprobs", Reading("kl.coef", {})


def token_loss(
    batch: TokenBatch,
    config: MethodConfig,
    response_limit: int | None = None,
    sequence_sum: SequenceSum = lambda sums: sums,
    sequence_gather: SequenceGather = lambda columns: columns,
) -> LossOutput:
    """The contribution of ``batch``: policy_loss + kl_loss - entropy.coef entropy, and
    ``MethodConfig.extra_terms``.

    Raises:
        ValueError: the batch lacks what the method reads.
    """
    terms = terms_of(batch, sequence_sum, response_limit, sequence_gather)
    weights = AGGREGATIONS.value(config.aggregate, terms)
    terms = replace(terms, advantages=token_advantages(terms, config))
    log_ratio, per_token, bounds = policy_term(terms, config.policy_loss)
    correction = mismatch_weights(terms, config.mismatch)
    if correction is not None:
        per_token = correction * per_token
    policy_loss = weighted_sum(per_token, weights, batch.loss_mask)
    kl_loss, divergence = kl_term(terms, config, weights)
    loss = policy_loss + kl_loss
    metrics = ratio_metrics(terms, log_ratio.detach(), bounds)
    if config.token_shaping:
        metrics["policy/token_advantage_mean"] = terms.mean(terms.advantages)
    if config.entropy.coef or "entropy" in batch.token_columns:
        entropy = terms.column("entropy")
        metrics["entropy/mean"] = terms.mean(entropy)
        if config.entropy.coef:
            loss = loss - config.entropy.coef * weighted_sum(entropy, weights, batch.loss_mask)
    for term in config.extra_terms.values():
        added = term.term(terms, weights)
        loss = loss + added.loss
        metrics |= added.metrics
    if divergence is not None:
        metrics["kl/reference_mean"] = terms.mean(divergence)
    if correction is not None:
        metrics["policy/correction_weight_mean"] = terms.mean(correction)
        metrics["policy/correction_dropped_share"] = terms.mean(correction == 0)
    metrics |= {
        "loss/total": loss.detach(),
        "loss/policy": policy_loss.detach(),
        "loss/kl": kl_loss.detach(),
    }
    return LossOutput(loss, metrics)


def token_advantages(terms: Terms, config: MethodConfig) -> PerToken:
    """The advantages of the responses at each token, shaped in order, detached."""
    advantages = terms.advantages
    for name, shaper in config.token_shaping.items():
        shaped = TOKEN_SHAPERS.value(shaper, terms, advantages=advantages)
        _check_per_token(f"token shaper {name}", shaped, terms)
        advantages = shaped.detach()
    return advantages


Bounds = tuple[Tensor | float, Tensor | float]


def policy_term(terms: Terms, chosen: Named) -> tuple[PerToken, PerToken, Bounds | None]:
    """The log ratio the loss clips (the sequence's under gspo, that to the sampler under dppo), the
    per-token loss, and the bounds of the ratio where the loss has any."""
    policy_loss = POLICY_LOSSES[chosen.name]
    if policy_loss.sampler_ratio:
        terms = replace(terms, log_ratio=terms.log_ratio + terms.gap)
    if policy_loss.sequence_ratio:
        terms = replace(terms, log_ratio=terms.response_mean(terms.log_ratio))
    knobs = chosen.knobs
    per_token = policy_loss(terms, knobs)
    bounds: Bounds | None = None
    if policy_loss.clips:
        bounds = (1 - knobs["low"], 1 + knobs["high"])
    if isinstance(per_token, Clipped):
        # Some losses compute bounds of their own, and give them beside the values.
        per_token, lower, upper = per_token
        bounds = (lower, upper)
    _check_per_token(f"policy loss {chosen.name}", per_token, terms)
    return terms.log_ratio, per_token, bounds


def _check_per_token(who: str, values: Any, terms: Terms) -> None:
    """Raises ValueError unless there is one value for each token."""
    if isinstance(values, Tensor) and values.shape == terms.log_ratio.shape:
        return
    returned = str(tuple(values.shape)) if isinstance(values, Tensor) else type(values).__name__
    raise ValueError(
        f"{who}: returned {returned}; return a tensor {tuple(terms.log_ratio.shape)}, one value"
        " per token"
    )


def kl_term(terms: Terms, config: MethodConfig, weights: Tensor) -> tuple[Scalar, PerToken | None]:
    """The KL part of the loss, and the estimator per token when a reference is given; a metric
    alone where no KL is in the loss."""
    zero = terms.logprobs.new_zeros(())
    if terms.batch.ref_logprobs is None and not config.kl.in_loss:
        return zero, None
    divergence = kl.ESTIMATORS[config.kl.estimator](terms.logprobs, terms.ref_logprobs)
    if not config.kl.in_loss:
        return zero, divergence
    if config.kl.aggregate not in (None, config.aggregate):
        weights = AGGREGATIONS.value(config.kl.aggregate, terms)
    weighted = _kl_coefficients(terms, *config.kl.by_sign) * divergence
    return weighted_sum(weighted, weights, terms.loss_mask), divergence


def _kl_coefficients(terms: Terms, positive: float, negative: float) -> PerToken:
    """kl.coef, or that of the response's sign, times its KL weight, at each token."""
    per_response = terms.batch.kl_weights.to(terms.dtype)
    if positive == negative:
        per_response = positive * per_response
    else:
        signed = where_correct(terms.correct, positive, negative, per_response.dtype)
        per_response = signed * per_response
    # From [responses] to [tokens].
    return per_response[terms.response_index]


def mismatch_weights(terms: Terms, config: MismatchConfig) -> PerToken | None:
    """Detached weights of the policy term, 1 where no sampler was at work; None: no correction."""
    if config.kind == "none":
        return None
    weights = CORRECTIONS[config.kind](terms, {"cap": config.cap})
    if "is_demonstration" not in terms.batch.columns:
        return weights
    return weights.masked_fill(terms.column("is_demonstration")[terms.response_index], 1)


def ratio_metrics(terms: Terms, log_ratio: Tensor, bounds: Bounds | None) -> dict[str, Tensor]:
    """Means over loss tokens of the ratio that the loss clips.

    Clip shares are by side of the clip and sign of the advantage.
    """
    ratio = log_ratio.exp()
    masked = ratio.masked_fill(~terms.loss_mask, 0)
    # The KL to the old policy is the token's, also where the loss clips the sequence's ratio.
    old_divergence = kl.k3(terms.log_ratio.detach(), torch.zeros_like(ratio))
    metrics = {
        "policy/ratio_mean": terms.mean(ratio),
        # No tokens have no maximum, and a micro-batch may have none.
        "policy/ratio_max": masked.max() if masked.numel() else masked.new_zeros(()),
        "policy/kl_old_mean": terms.mean(old_divergence),
    }
    if bounds is not None:
        above = ratio > bounds[1]
        below = ratio < bounds[0]
        signs = {"positive": terms.advantages > 0, "negative": terms.advantages < 0}
        for sign, rows in signs.items():
            metrics[f"policy/clip_up_{sign}_share"] = terms.mean(above & rows)
            metrics[f"policy/clip_down_{sign}_share"] = terms.mean(below & rows)
    return metrics
