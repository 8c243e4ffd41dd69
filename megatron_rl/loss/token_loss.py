"""From the tokens of a micro-batch to its contribution to the minibatch loss. Knobs are plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.loss import aggregate, kl, mismatch
from megatron_rl.loss import policy_losses as losses
from megatron_rl.loss.batch import LossResult, TokenBatch
from megatron_rl.loss.segments import lifted, where_correct

Knobs = Mapping[str, Any]
SequenceSum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossPlan:
    """A method's choices: names and knobs of its pieces."""

    policy_loss: str
    policy_knobs: Knobs
    aggregate: tuple[str, int | None]  # name, norm_len
    kl_aggregate: tuple[str, int | None]
    kl_estimator: str
    kl_coef: tuple[float, float]  # (correct, incorrect); equal unless per-sign coefficients are set
    entropy_coef: float
    mismatch: str
    mismatch_cap: float


@dataclass(frozen=True)
class Terms:
    """A batch, lifted, with its denominators; masked tokens have a log ratio of 0 so that nothing outside the mask matters."""

    batch: TokenBatch
    logprobs: Float[Tensor, " tokens"]
    log_ratio: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    response_loss_tokens: Int[Tensor, " responses"]
    num_responses: int
    num_tokens: int
    sequence_sum: SequenceSum

    def weights(self, name: str, norm_len: int | None) -> Float[Tensor, " tokens"]:
        ids, dtype = self.batch.response_ids, self.logprobs.dtype
        if name == "token_mean":
            return aggregate.token_mean(self.num_tokens, ids, dtype)
        if name == "seq_mean_token_mean":
            return aggregate.seq_mean_token_mean(self.num_responses, self.response_loss_tokens, ids, dtype)
        if name == "seq_mean_token_sum":
            return aggregate.seq_mean_token_sum(self.num_responses, ids, dtype)
        if norm_len is None:
            raise ValueError("aggregate.norm_len is null: seq_mean_token_sum_norm divides by it; set it or pass response_limit")
        return aggregate.seq_mean_token_sum_norm(self.num_responses, norm_len, ids, dtype)

    def mean(self, values: Tensor) -> Float[Tensor, ""]:
        """Contribution to the mean over the loss tokens of the minibatch, detached."""
        kept = values.detach().to(self.logprobs.dtype).masked_fill(~self.batch.loss_mask, 0)
        return kept.sum() / max(self.num_tokens, 1)


def token_loss(batch: TokenBatch, plan: LossPlan, sequence_sum: SequenceSum) -> LossResult:
    """The contribution of ``batch``: policy_loss + kl_loss - entropy_coef entropy.

    Raises:
        ValueError: the batch lacks what the method reads.
    """
    terms = prepare(batch, sequence_sum)
    weights = terms.weights(*plan.aggregate)
    log_ratio, per_token = policy_term(terms, plan)
    correction = mismatch_weights(terms, plan)
    policy_loss = aggregate.weighted_sum(per_token if correction is None else correction * per_token, weights, batch.loss_mask)
    kl_loss, divergence = kl_term(terms, plan, weights)
    loss = policy_loss + kl_loss
    metrics = ratio_metrics(terms, log_ratio.detach(), plan)
    if batch.entropy is not None:
        entropy = lifted(batch.entropy)
        metrics["entropy/mean"] = terms.mean(entropy)
        if plan.entropy_coef:
            loss = loss - plan.entropy_coef * aggregate.weighted_sum(entropy, weights, batch.loss_mask)
    elif plan.entropy_coef:
        raise ValueError("TokenBatch.entropy is missing, but entropy.coef is not 0; give it, or set entropy.coef=0")
    if divergence is not None:
        metrics["kl/reference_mean"] = terms.mean(divergence)
    if correction is not None:
        metrics["policy/correction_weight_mean"] = terms.mean(correction)
        metrics["policy/correction_dropped_share"] = terms.mean(correction == 0)
    metrics |= {"loss/total": loss.detach(), "loss/policy": policy_loss.detach(), "loss/kl": kl_loss.detach()}
    return LossResult(loss, policy_loss, kl_loss, metrics)


def prepare(batch: TokenBatch, sequence_sum: SequenceSum) -> Terms:
    """The batch as the terms read it: float32 or float64, masked, with the denominators given or else its own."""
    logprobs = lifted(batch.logprobs)
    mask, ids = batch.loss_mask, batch.response_ids
    logprobs = logprobs.masked_fill(~mask, 0)
    log_ratio = logprobs - lifted(batch.old_logprobs).to(logprobs.dtype).masked_fill(~mask, 0)
    lengths = batch.response_loss_tokens
    if lengths is None:
        lengths = torch.zeros(batch.advantages.shape, dtype=torch.int64, device=mask.device).index_add(0, ids, mask.long())
    return Terms(
        batch=batch,
        logprobs=logprobs,
        log_ratio=log_ratio,
        advantages=batch.advantages.to(logprobs.dtype)[ids],
        response_loss_tokens=lengths,
        num_responses=batch.advantages.numel() if batch.num_responses is None else batch.num_responses,
        num_tokens=int(mask.sum()) if batch.num_tokens is None else batch.num_tokens,
        sequence_sum=sequence_sum,
    )


def _clipped(terms: Terms, **knobs: Any) -> Tensor:
    return losses.ppo_clip(terms.log_ratio, terms.advantages, **knobs)


POLICY_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": _clipped,
    "gspo": _clipped,
    "cispo": lambda t, **knobs: losses.cispo(t.logprobs, t.log_ratio, t.advantages, **knobs),
    "reinforce": lambda t: losses.reinforce(t.logprobs, t.advantages),
    "ratio": lambda t: losses.ratio(t.log_ratio, t.advantages),
}
SEQUENCE_RATIO = {"gspo"}  # read the response's mean log ratio in place of the token's
CLIPS = {"ppo_clip", "gspo", "cispo"}  # clip the ratio to [1 - low, 1 + high] of their knobs


def policy_term(terms: Terms, plan: LossPlan) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """The log ratio the loss clips (the sequence's under gspo), and the per-token loss."""
    if plan.policy_loss in SEQUENCE_RATIO:
        batch = terms.batch
        log_ratio = losses.sequence_log_ratio(
            terms.log_ratio,
            batch.loss_mask,
            batch.response_ids,
            terms.response_loss_tokens,
            terms.sequence_sum,
        )
        terms = replace(terms, log_ratio=log_ratio)
    per_token = POLICY_LOSSES[plan.policy_loss](terms, **plan.policy_knobs)
    if not isinstance(per_token, Tensor) or per_token.shape != terms.log_ratio.shape:
        what = tuple(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
        raise ValueError(
            f"policy loss {plan.policy_loss}: returned {what}; return a tensor "
            f"{tuple(terms.log_ratio.shape)}, one value per token"
        )
    return terms.log_ratio, per_token


def kl_term(terms: Terms, plan: LossPlan, policy_weights: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, " tokens"] | None]:
    """(coefficient and weight times the aggregated estimator, the estimator per token when a reference is given)."""
    batch = terms.batch
    zero = terms.logprobs.new_zeros(())
    if batch.ref_logprobs is None:
        if any(plan.kl_coef):
            raise ValueError("TokenBatch.ref_logprobs is missing, but the KL coefficient is not 0; give it, or set kl.coef=0")
        return zero, None
    ref = lifted(batch.ref_logprobs).to(terms.logprobs.dtype).masked_fill(~batch.loss_mask, 0)
    divergence = kl.ESTIMATORS[plan.kl_estimator](terms.logprobs, ref)
    if not any(plan.kl_coef):
        return zero, divergence
    weights = policy_weights if plan.kl_aggregate == plan.aggregate else terms.weights(*plan.kl_aggregate)
    return aggregate.weighted_sum(_kl_coefficients(terms, plan) * divergence, weights, batch.loss_mask), divergence


def _kl_coefficients(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"]:
    batch = terms.batch
    per_response = batch.kl_weights.to(terms.logprobs.dtype)
    if plan.kl_coef[0] == plan.kl_coef[1]:
        per_response = plan.kl_coef[0] * per_response
    elif batch.correct is None:
        raise ValueError("TokenBatch.correct is missing, but kl.coef_positive and kl.coef_negative differ; give it")
    else:
        per_response = where_correct(batch.correct, *plan.kl_coef, per_response.dtype) * per_response
    return per_response[batch.response_ids]


def mismatch_weights(terms: Terms, plan: LossPlan) -> Float[Tensor, " tokens"] | None:
    """Detached weights of the policy term, None without a correction."""
    if plan.mismatch == "none":
        return None
    gap = _gap(terms)
    if gap is None:
        raise ValueError(f"TokenBatch.sampler_logprobs is missing, but mismatch.kind = {plan.mismatch} reads it; give it")
    if plan.mismatch == "tis":
        return mismatch.truncated_importance(gap, cap=plan.mismatch_cap)
    if plan.mismatch == "icepop":
        return mismatch.icepop(gap, cap=plan.mismatch_cap)
    batch = terms.batch
    return mismatch.sequence_mask(
        gap, batch.loss_mask, batch.response_ids, terms.response_loss_tokens, terms.sequence_sum, cap=plan.mismatch_cap
    )


def _gap(terms: Terms) -> Float[Tensor, " tokens"] | None:
    """old_logprobs - sampler_logprobs, 0 outside the mask."""
    batch = terms.batch
    if batch.sampler_logprobs is None:
        return None
    dtype = terms.logprobs.dtype
    gap = lifted(batch.old_logprobs).to(dtype) - lifted(batch.sampler_logprobs).to(dtype)
    return gap.masked_fill(~batch.loss_mask, 0).detach()


def ratio_metrics(terms: Terms, log_ratio: Tensor, plan: LossPlan) -> dict[str, Tensor]:
    """Means over loss tokens; clip fractions by side of the clip and sign of the advantage (of the ratio the loss clips)."""
    ratio = log_ratio.exp()
    masked = ratio.masked_fill(~terms.batch.loss_mask, 0)
    result = {
        "policy/ratio_mean": terms.mean(ratio),
        "policy/ratio_max": masked.max() if masked.numel() else masked.new_zeros(()),
        "policy/kl_old_mean": terms.mean(kl.k3(terms.log_ratio.detach(), torch.zeros_like(ratio))),
    }
    if plan.policy_loss in CLIPS:
        above, below = ratio > 1 + plan.policy_knobs["high"], ratio < 1 - plan.policy_knobs["low"]
        for sign, rows in (("positive", terms.advantages > 0), ("negative", terms.advantages < 0)):
            result[f"policy/clip_up_{sign}_share"] = terms.mean(above & rows)
            result[f"policy/clip_down_{sign}_share"] = terms.mean(below & rows)
    return result
