"""From the tokens of a micro-batch to its contribution to the minibatch loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss.batch import Knobs, LossResult, Reading, Readings, TokenBatch
from megatron_rl.loss.choices import (
    AGGREGATIONS,
    CORRECTIONS,
    POLICY_LOSSES,
    TOKEN_SHAPERS,
)
from megatron_rl.loss.per_token import aggregate, kl, self_reward
from megatron_rl.loss.per_token import policy_losses as losses
from megatron_rl.loss.per_token.entropy_anchor import anchored
from megatron_rl.loss.per_token.perception import perception_loss
from megatron_rl.loss.per_token.response_losses import Clipped
from megatron_rl.loss.per_token.terms import SequenceSum, Terms, terms_of
from megatron_rl.loss.per_token.whole_responses import SequenceGather
from megatron_rl.loss.segments import where_correct


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
    entropy_anchor: Knobs | None = None
    self_reward: Knobs | None = None
    perception: Knobs | None = None


def token_reads_of(plan: LossPlan) -> Readings:
    """The columns of TokenBatch, and those of its fields that it may lack, that the chosen
    functions read, each with who reads it."""
    found: Readings = {}

    def add(columns: Iterable[str], reader: str, knobs: Knobs, remedy: str = "give it") -> None:
        for column in columns:
            found.setdefault(column, []).append(Reading(reader, knobs, remedy))

    for name, knobs in plan.token_shaping:
        add(TOKEN_SHAPERS[name].reads, f"token shaper {name}", knobs)
    for name, knobs in (plan.aggregate, plan.kl_aggregate):
        add(AGGREGATIONS[name].reads, f"aggregation {name}", knobs)
    name = plan.policy_loss
    add(POLICY_LOSSES[name].reads, f"policy loss {name}", plan.policy_knobs)
    if plan.entropy_coef:
        remedy = "give it, or set entropy.coef=0"
        add(["entropy"], "entropy.coef", {"gradient": True}, remedy)
    if plan.entropy_anchor is not None:
        add(["nucleus_entropy", "peaks"], "entropy_anchor", plan.entropy_anchor)
    if plan.self_reward is not None:
        columns = ("end_logprobs", "end_index", "end_start", "correct")
        add(columns, "self_reward", plan.self_reward)
    if plan.perception is not None:
        add(["masked_logprobs"], "perception", plan.perception)
    if any(plan.kl_coef):
        add(["ref_logprobs"], "kl.coef", {}, "give it, or set kl.coef=0")
    if plan.kl_coef[0] != plan.kl_coef[1]:
        add(["correct"], "kl.coef_positive beside kl.coef_negative", {})
    if plan.mismatch != "none":
        add(["sampler_logprobs"], f"mismatch.kind = {plan.mismatch}", {})
    return found


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
    for name, (reading, *_) in token_reads_of(plan).items():
        if not batch.has(name):
            raise ValueError(
                f"TokenBatch has no {name}, but {reading.reader} reads it; {reading.remedy}"
            )
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
    if batch.has("entropy"):
        entropy = terms.column("entropy")
        metrics["entropy/mean"] = terms.mean(entropy)
        if plan.entropy_coef:
            bonus = aggregate.weighted_sum(entropy, weights, batch.loss_mask)
            loss = loss - plan.entropy_coef * bonus
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
        return zero, None
    divergence = kl.ESTIMATORS[plan.kl_estimator](terms.logprobs, terms.ref_logprobs)
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
    if plan.entropy_anchor is None:
        return None
    columns = (terms.column(name) for name in ("nucleus_entropy", "peaks"))
    return anchored(*columns, terms.loss_mask, coef=plan.entropy_anchor["coef"])


def self_reward_term(
    terms: Terms, plan: LossPlan
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]] | None:
    """What the policy's reward for itself is off by, and the share where it is right; None without
    one."""
    if plan.self_reward is None:
        return None
    beta = plan.self_reward["beta"]
    logprobs = terms.column("end_logprobs")
    start = terms.column("end_start")
    correct = terms.correct[terms.column("end_index")]
    off = self_reward.self_reward_loss(logprobs, start, correct, beta=beta)
    right = self_reward.agrees(logprobs, start, correct, beta=beta)
    num = max(terms.num_responses, 1)
    return plan.self_reward["alpha"] * off.sum() / num, right.to(terms.dtype).sum() / num


def perception_term(
    terms: Terms, plan: LossPlan, weights: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]] | None:
    """What the masked images are for, the mean of its KL, and the mean -logprob that they leave;
    None without one."""
    if plan.perception is None:
        return None
    # These two say how images are masked and which policy sees them: not of the loss.
    signal = ("mask_ratio", "masked")
    knobs = {name: value for name, value in plan.perception.items() if name not in signal}
    masked = terms.column("masked_logprobs")
    per_token, divergence = perception_loss(terms.logprobs, masked, **knobs)
    total = aggregate.weighted_sum(per_token, weights, terms.loss_mask)
    return total, terms.mean(divergence), terms.mean(-masked)


def _kl_coefficients(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"]:
    """kl.coef, or that of the response's sign, times its KL weight, at each token."""
    per_response = terms.batch.kl_weights.to(terms.dtype)
    if plan.kl_coef[0] == plan.kl_coef[1]:
        per_response = plan.kl_coef[0] * per_response
    else:
        signed = where_correct(terms.correct, *plan.kl_coef, per_response.dtype)
        per_response = signed * per_response
    # From [responses] to [tokens].
    return per_response[terms.response_index]


def mismatch_weights(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"] | None:
    """Detached weights of the policy term, 1 where no sampler was at work; None without a
    correction."""
    if plan.mismatch == "none":
        return None
    weights = CORRECTIONS[plan.mismatch](terms, {"cap": plan.mismatch_cap})
    if not terms.batch.has("is_demonstration"):
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
