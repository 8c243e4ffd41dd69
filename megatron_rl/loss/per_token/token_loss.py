"""From the tokens of a micro-batch to its contribution to the minibatch loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss.batch import LossResult, TokenBatch
from megatron_rl.loss.choices import (
    AGGREGATIONS,
    CORRECTIONS,
    POLICY_LOSSES,
    TOKEN_SHAPERS,
    Knobs,
)
from megatron_rl.loss.per_token import aggregate, kl, self_reward
from megatron_rl.loss.per_token import policy_losses as losses
from megatron_rl.loss.per_token.entropy_anchor import anchored
from megatron_rl.loss.per_token.perception import perception_loss
from megatron_rl.loss.per_token.response_losses import Clipped
from megatron_rl.loss.per_token.terms import SequenceSum, Terms, terms_of
from megatron_rl.loss.per_token.whole_responses import SequenceGather
from megatron_rl.loss.segments import lifted, where_correct


@dataclass(frozen=True)
class LossPlan:
    """A method's choices for an optimizer step: names and knobs."""

    policy_loss: str
    policy_knobs: Knobs
    aggregate: tuple[str, Knobs]
    kl_aggregate: tuple[str, Knobs]
    kl_estimator: str
    kl_coef: tuple[float, float]  # (correct, incorrect); equal unless per-sign coefficients are set
    entropy_coef: float
    mismatch: str
    mismatch_cap: float
    response_limit: int | None = None
    token_shaping: tuple[tuple[str, Knobs], ...] = ()
    entropy_anchor: float | None = None  # the coefficient
    self_reward: tuple[float, float] | None = None  # alpha, beta
    perception: Knobs | None = None


def token_reads_of(plan: LossPlan) -> dict[str, str]:
    """Optional fields of TokenBatch that the chosen functions read, each with who reads it."""
    fields: dict[str, str] = {}
    for name, _ in plan.token_shaping:
        fields |= dict.fromkeys(TOKEN_SHAPERS[name].reads, f"token shaper {name}")
    if plan.entropy_anchor is not None:
        fields |= dict.fromkeys(("nucleus_entropy", "peaks"), "entropy_anchor")
    if plan.self_reward is not None:
        fields |= dict.fromkeys(("end_logprobs", "end_index", "end_start"), "self_reward")
        fields["correct"] = "self_reward"
    if plan.perception is not None:
        fields["masked_logprobs"] = "perception"
    for name in (plan.aggregate[0], plan.kl_aggregate[0]):
        fields |= dict.fromkeys(AGGREGATIONS[name].reads, f"aggregation {name}")
    reads = POLICY_LOSSES[plan.policy_loss].reads
    return fields | dict.fromkeys(reads, f"policy loss {plan.policy_loss}")


def token_loss(
    batch: TokenBatch,
    plan: LossPlan,
    sequence_sum: SequenceSum,
    sequence_gather: SequenceGather = lambda columns: columns,
) -> LossResult:
    """The contribution of ``batch``: policy_loss + kl_loss - entropy_coef entropy, and what is
    beside them.

    Raises:
        ValueError: the batch lacks what the method reads.
    """
    for field, reader in token_reads_of(plan).items():
        if getattr(batch, field) is None:
            raise ValueError(f"TokenBatch.{field} is missing, but {reader} reads it; give it")
    terms = terms_of(batch, sequence_sum, plan.response_limit, sequence_gather)
    weights = token_weights(terms, plan.aggregate)
    terms = replace(terms, advantages=token_advantages(terms, plan))
    log_ratio, per_token, bounds = policy_term(terms, plan)
    correction = mismatch_weights(terms, plan)
    if correction is not None:
        per_token = correction * per_token
    policy_loss = aggregate.weighted_sum(per_token, weights, batch.loss_mask)
    kl_loss, divergence = kl_term(terms, plan, weights)
    loss = policy_loss + kl_loss
    metrics = ratio_metrics(terms, log_ratio.detach(), bounds)
    if plan.token_shaping:
        metrics["policy/token_advantage_mean"] = terms.mean(terms.advantages)
    if batch.entropy is not None:
        entropy = lifted(batch.entropy)
        metrics["entropy/mean"] = terms.mean(entropy)
        if plan.entropy_coef:
            bonus = aggregate.weighted_sum(entropy, weights, batch.loss_mask)
            loss = loss - plan.entropy_coef * bonus
    elif plan.entropy_coef:
        raise ValueError(
            "TokenBatch.entropy is missing, but entropy.coef is not 0; give it, or set"
            " entropy.coef=0"
        )
    for term, reported in other_terms(terms, plan, weights):
        loss = loss + term
        metrics |= reported
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
    return LossResult(loss, policy_loss, kl_loss, metrics)


def token_weights(terms: Terms, aggregation: tuple[str, Knobs]) -> Float[Tensor, " tokens"]:
    """The weight of each loss token, by denominators of the whole minibatch."""
    name, knobs = aggregation
    return AGGREGATIONS[name](terms, knobs)


def token_advantages(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"]:
    """The advantages of the responses at each token, shaped in order, detached."""
    advantages = terms.advantages
    for name, knobs in plan.token_shaping:
        shaped = TOKEN_SHAPERS[name](terms, knobs, advantages)
        _check_per_token(f"token shaper {name}", shaped, terms)
        advantages = shaped.detach()
    return advantages


Bounds = tuple[Tensor | float, Tensor | float]


def policy_term(
    terms: Terms, plan: LossPlan
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Bounds | None]:
    """The log ratio the loss clips (the sequence's under gspo), the per-token loss, and the bounds
    of the ratio where the loss has any."""
    chosen = POLICY_LOSSES[plan.policy_loss]
    if chosen.sequence_ratio:
        log_ratio = losses.sequence_log_ratio(
            terms.log_ratio,
            terms.loss_mask,
            terms.response_index,
            terms.response_loss_tokens,
            terms.sequence_sum,
        )
        terms = replace(terms, log_ratio=log_ratio)
    per_token = chosen(terms, plan.policy_knobs)
    bounds: Bounds | None = None
    if chosen.clips:
        bounds = (1 - plan.policy_knobs["low"], 1 + plan.policy_knobs["high"])
    if isinstance(per_token, Clipped):
        # Some losses compute bounds of their own, and give them beside the values.
        per_token, lower, upper = per_token
        bounds = (lower, upper)
    _check_per_token(f"policy loss {plan.policy_loss}", per_token, terms)
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


def kl_term(
    terms: Terms, plan: LossPlan, policy_weights: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, " tokens"] | None]:
    """The KL part of the loss, and the estimator per token when a reference is given."""
    batch = terms.batch
    zero = terms.logprobs.new_zeros(())
    if batch.ref_logprobs is None:
        if any(plan.kl_coef):
            raise ValueError(
                "TokenBatch.ref_logprobs is missing, but the KL coefficient is not 0; give it, or"
                " set kl.coef=0"
            )
        return zero, None
    # Filled, not multiplied: outside of the mask may be NaN, which times 0 stays NaN.
    ref_logprobs = lifted(batch.ref_logprobs).to(terms.dtype).masked_fill(~terms.loss_mask, 0)
    divergence = kl.ESTIMATORS[plan.kl_estimator](terms.logprobs, ref_logprobs)
    if not any(plan.kl_coef):
        # No KL in the loss: a metric alone.
        return zero, divergence
    weights = policy_weights
    if plan.kl_aggregate != plan.aggregate:
        weights = token_weights(terms, plan.kl_aggregate)
    weighted = _kl_coefficients(terms, plan) * divergence
    return aggregate.weighted_sum(weighted, weights, terms.loss_mask), divergence


def other_terms(
    terms: Terms, plan: LossPlan, weights: Tensor
) -> Iterator[tuple[Float[Tensor, ""], dict[str, Tensor]]]:
    """What a method adds to the loss beside policy, KL and entropy, each with its metrics."""
    anchor = anchor_term(terms, plan)
    if anchor is not None:
        loss, mean = anchor
        metrics = {"loss/entropy_anchor": loss.detach(), "entropy/nucleus_peak_mean": mean}
        yield loss, metrics
    verdicts = self_reward_term(terms, plan)
    if verdicts is not None:
        loss, right = verdicts
        yield loss, {"loss/self_reward": loss.detach(), "policy/self_reward_accuracy": right}
    perceived = perception_term(terms, plan, weights)
    if perceived is not None:
        loss, divergence, masked = perceived
        metrics = {"kl/perception_mean": divergence, "entropy/masked_sampled_mean": masked}
        yield loss, {"loss/perception": loss.detach(), **metrics}


def anchor_term(terms: Terms, plan: LossPlan) -> tuple[Float[Tensor, ""], Float[Tensor, ""]] | None:
    """The pull of the entropy to its start, and the mean that it is of; None without one."""
    batch = terms.batch
    if plan.entropy_anchor is None:
        return None
    assert batch.nucleus_entropy is not None and batch.peaks is not None
    entropy = lifted(batch.nucleus_entropy).to(terms.dtype).masked_fill(~terms.loss_mask, 0)
    return anchored(entropy, batch.peaks, terms.loss_mask, coef=plan.entropy_anchor)


def self_reward_term(
    terms: Terms, plan: LossPlan
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]] | None:
    """What the policy's reward for itself is off by, and the share where it is right; None without
    one."""
    batch = terms.batch
    if plan.self_reward is None:
        return None
    assert batch.end_logprobs is not None and batch.end_start is not None
    alpha, beta = plan.self_reward
    logprobs = lifted(batch.end_logprobs).to(terms.dtype)
    correct = terms.correct[batch.end_index]
    off = self_reward.self_reward_loss(logprobs, batch.end_start, correct, beta=beta)
    right = self_reward.agrees(logprobs, batch.end_start, correct, beta=beta)
    num = max(terms.num_responses, 1)
    return alpha * off.sum() / num, right.to(terms.dtype).sum() / num


def perception_term(
    terms: Terms, plan: LossPlan, weights: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]] | None:
    """What the masked images are for, the mean of its KL, and the mean -logprob that they leave;
    None without one."""
    batch = terms.batch
    if plan.perception is None:
        return None
    assert batch.masked_logprobs is not None
    masked = lifted(batch.masked_logprobs).to(terms.dtype).masked_fill(~terms.loss_mask, 0)
    per_token, divergence = perception_loss(terms.logprobs, masked, **plan.perception)
    total = aggregate.weighted_sum(per_token, weights, terms.loss_mask)
    return total, terms.mean(divergence), terms.mean(-masked)


def _kl_coefficients(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"]:
    """kl.coef, or that of the response's sign, times its KL weight, at each token."""
    correct = terms.batch.correct
    per_response = terms.batch.kl_weights.to(terms.dtype)
    if plan.kl_coef[0] == plan.kl_coef[1]:
        per_response = plan.kl_coef[0] * per_response
    elif correct is None:
        raise ValueError(
            "TokenBatch.correct is missing, but kl.coef_positive and kl.coef_negative differ;"
            " give it"
        )
    else:
        per_response = where_correct(correct, *plan.kl_coef, per_response.dtype) * per_response
    # From [responses] to [tokens].
    return per_response[terms.response_index]


def mismatch_weights(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"] | None:
    """Detached weights of the policy term, 1 where no sampler was at work; None without a
    correction."""
    if plan.mismatch == "none":
        return None
    if terms.batch.sampler_logprobs is None:
        raise ValueError(
            f"TokenBatch.sampler_logprobs is missing, but mismatch.kind = {plan.mismatch} reads it;"
            " give it"
        )
    weights = CORRECTIONS[plan.mismatch](terms, {"cap": plan.mismatch_cap})
    return weights if terms.batch.given is None else weights.masked_fill(terms.given, 1)


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
