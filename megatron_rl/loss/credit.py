"""From a batch of responses to advantages and KL weights: estimator, then shapers, by name. Knobs are plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss import advantages as adv
from megatron_rl.loss import filters, kl, shaping
from megatron_rl.loss.batch import Credit, EstimatorNeeds, ResponseBatch
from megatron_rl.loss.segments import Segments, lifted, segments_of, where_correct

Knobs = Mapping[str, Any]
ONE = 1e-6  # a total reward this close to 1 is 1: it is a sum of weighted parts


@dataclass(frozen=True)
class CreditPlan:
    """A method's choices: names and knobs of its pieces."""

    estimator: str
    estimator_knobs: Knobs
    shaping: tuple[tuple[str, Knobs], ...]
    kl_curve: str | None  # DADS curve; None = constant weights
    kl_in_reward: bool
    kl_coef: tuple[float, float]  # (correct, incorrect)
    drop_all_correct: bool
    eps: float
    ddof: int


@dataclass(frozen=True)
class Evidence:
    """What the pieces read. ``rewards`` hold the KL where it is placed in the reward; ``plain_rewards`` never do."""

    batch: ResponseBatch
    rewards: Float[Tensor, " responses"]
    plain_rewards: Float[Tensor, " responses"]
    groups: Segments
    accuracy: Float[Tensor, " groups"]
    omega: Float[Tensor, ""]
    eps: float
    ddof: int

    @property
    def correct(self) -> Bool[Tensor, " responses"]:
        return self.batch.correct

    @property
    def lengths(self) -> Int[Tensor, " responses"]:
        return self.batch.response_tokens

    @property
    def share(self) -> Float[Tensor, " responses"]:
        """The group's accuracy, at each response."""
        return self.groups.broadcast(self.accuracy)


def _mixed(e: Evidence, *, success: str) -> Tensor:
    hit = e.correct if success == "correct" else (e.plain_rewards - 1).abs() <= ONE
    return adv.mixed(e.rewards, e.groups.mean(hit.to(e.rewards.dtype)), e.groups, eps=e.eps, ddof=e.ddof)


def _durian(e: Evidence, *, normalise: bool, **knobs: Any) -> Tensor:
    confidence = e.batch.mean_logprobs if normalise else e.batch.sum_logprobs
    confidence = e.rewards if confidence is None else confidence.to(e.rewards.dtype)  # not read when reasoning is 0
    visual = None if e.batch.visual_entropy is None else e.batch.visual_entropy.to(e.rewards.dtype)
    return adv.durian(e.rewards, confidence, visual, e.groups, eps=e.eps, ddof=e.ddof, **knobs)


def _stcr(advantages: Tensor, e: Evidence, *, window: str, **knobs: Any) -> Tensor:
    segments = e.groups if window == "group" else segments_of(torch.zeros_like(e.groups.index))
    return shaping.stcr(advantages, e.correct, e.lengths, segments, **knobs)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "zscore": lambda e: adv.zscore(e.rewards, e.groups, eps=e.eps, ddof=e.ddof),
    "centered": lambda e: adv.centered(e.rewards, e.groups),
    "rloo": lambda e: adv.rloo(e.rewards, e.groups),
    "opo": lambda e: adv.opo(e.rewards, e.lengths, e.groups),
    "reinforce_pp_baseline": lambda e: adv.reinforce_pp_baseline(e.rewards, e.lengths, e.groups),
    "gpg": lambda e: adv.gpg(e.rewards, e.groups),
    "tree": lambda e: adv.tree(e.rewards, e.groups),
    "apd": lambda e: adv.apd(e.rewards, e.groups, eps=e.eps),
    "mixed": _mixed,
    "krpo": lambda e, **knobs: adv.krpo(e.rewards, e.groups, **knobs),
    "signed": lambda e, **knobs: adv.signed(e.correct, e.rewards.dtype, **knobs),
    "lead": lambda e, **knobs: adv.lead(e.correct, e.lengths, e.accuracy, e.groups, eps=e.eps, ddof=e.ddof, **knobs),
    "durian": _durian,
    "pass_at_k": lambda e, k: adv.pass_at_k(e.correct, e.rewards.dtype, e.groups, k=k),
}

SHAPERS: dict[str, Callable[..., Tensor]] = {
    "stcr": _stcr,
    "ddas": lambda a, e: shaping.ddas(a, e.share, e.omega),
    "ass": lambda a, e, alpha: shaping.ass(a, e.omega, alpha=alpha),
    "sign_scale": lambda a, e, **knobs: shaping.sign_scale(a, **knobs),
    "hard_focused": lambda a, e: shaping.hard_focused(a, e.share),
    "easy_focused": lambda a, e: shaping.easy_focused(a, e.share),
    "focal": lambda a, e, gamma: shaping.focal(a, e.share, gamma=gamma),
}

# Estimators that ask for other than groups of two. What durian reads depends on its knobs:
# ``_check_fields``.
NEEDS: dict[str, EstimatorNeeds] = {
    "tree": EstimatorNeeds(unit_rewards=True),
    "mixed": EstimatorNeeds(unit_rewards=True),
    "apd": EstimatorNeeds(unit_rewards=True),
    "signed": EstimatorNeeds(min_group=1),  # gives a group of one response a meaning, as krpo does
    "krpo": EstimatorNeeds(min_group=1),
    "pass_at_k": EstimatorNeeds(min_group="k"),
}
SHAPER_READS: dict[str, tuple[str, ...]] = {}  # optional fields of ResponseBatch, by shaper


def needs_of(estimator: str) -> EstimatorNeeds:
    """What an estimator asks of the batch."""
    return NEEDS[estimator] if estimator in NEEDS else EstimatorNeeds()


def reads_of(plan: CreditPlan) -> dict[str, str]:
    """Optional fields of ResponseBatch that the pieces of a plan declare, with who reads them."""
    fields = dict.fromkeys(needs_of(plan.estimator).reads, f"estimator {plan.estimator}")
    for name, _ in plan.shaping:
        for field in SHAPER_READS[name] if name in SHAPER_READS else ():
            fields[field] = f"shaper {name}"
    return fields


def credit(batch: ResponseBatch, plan: CreditPlan) -> Credit:
    """Advantages, KL weights and the rows that take part.

    Raises:
        ValueError: the batch lacks what the method reads, or lies outside its domain.
    """
    rewards = lifted(batch.rewards)
    groups = segments_of(batch.group_ids)
    check(batch, rewards, groups, plan)
    accuracy = groups.mean(batch.correct.to(rewards.dtype))
    kl_weights = torch.ones_like(rewards) if plan.kl_curve is None else kl.dads(batch.correct, accuracy, groups, curve=plan.kl_curve)
    shaped = rewards
    if plan.kl_in_reward and batch.kl is not None:
        shaped = rewards - where_correct(batch.correct, *plan.kl_coef, rewards.dtype) * kl_weights * batch.kl.to(rewards.dtype)
    evidence = Evidence(batch, shaped, rewards, groups, accuracy, rewards.mean().clamp(0, 1), plan.eps, plan.ddof)
    advantages = ESTIMATORS[plan.estimator](evidence, **plan.estimator_knobs)
    check_advantages(f"estimator {plan.estimator}", advantages, rewards)
    for name, knobs in plan.shaping:
        advantages = SHAPERS[name](advantages, evidence, **knobs)
        check_advantages(f"shaper {name}", advantages, rewards)
    keep = filters.not_all_correct(batch.correct, groups) if plan.drop_all_correct else torch.ones_like(batch.correct)
    return Credit(advantages, kl_weights, keep, metrics(evidence, advantages, kl_weights, keep))


def metrics(evidence: Evidence, advantages: Tensor, kl_weights: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """What the papers plot, over the whole batch. ``length_gap_tokens`` is mean length of incorrect minus mean length of
    correct responses (0 when either is missing); an extreme group has one correct or one incorrect response."""
    groups, correct = evidence.groups, evidence.correct
    right = groups.sum(correct)
    lengths = evidence.lengths.to(advantages.dtype)

    def share(flags: Tensor) -> Tensor:
        return flags.to(advantages.dtype).mean()

    def mean_length(rows: Tensor) -> Tensor:
        return (lengths * rows).sum() / rows.sum().clamp(min=1)

    both = correct.any() & ~correct.all()
    gap = mean_length(~correct) - mean_length(correct)
    return {
        "credit/zero_spread_group_share": share(groups.spread(evidence.rewards) == 0),
        "credit/extreme_group_share": share((groups.count > 1) & ((right == 1) | (right == groups.count - 1))),
        "credit/all_correct_group_share": share(right == groups.count),
        "credit/none_correct_group_share": share(right == 0),
        "credit/advantage_positive_sum": advantages.clamp(min=0).sum(),
        "credit/advantage_negative_sum": -advantages.clamp(max=0).sum(),
        "credit/omega": evidence.omega,
        "credit/accuracy_mean": evidence.accuracy.mean(),
        "credit/length_gap_tokens": torch.where(both, gap, torch.zeros_like(gap)),
        "credit/kl_weight_mean": kl_weights.mean(),
        "credit/kept_response_share": share(keep),
    }


def check_advantages(who: str, advantages: Any, rewards: Tensor) -> None:
    """Raises ValueError unless each response has one finite number of the rewards' dtype."""
    what, wanted = type(advantages).__name__, f"{tuple(rewards.shape)} {rewards.dtype}"
    if isinstance(advantages, Tensor):
        what = f"{tuple(advantages.shape)} {advantages.dtype}"
    if not isinstance(advantages, Tensor) or what != wanted:
        raise ValueError(f"{who}: returned {what}; return a tensor {wanted}, one per response")
    finite = advantages.isfinite()
    if not bool(finite.all()):
        row = int(torch.nonzero(~finite)[0])
        raise ValueError(
            f"{who}: the advantage of response {row} is {float(advantages[row])} at a reward of "
            f"{float(rewards[row]):g}; guard its divisors"
        )


def check(batch: ResponseBatch, rewards: Tensor, groups: Segments, plan: CreditPlan) -> None:
    """Raises ValueError where the batch lacks what the method reads or lies outside its domain."""
    name, knobs, needs = plan.estimator, plan.estimator_knobs, needs_of(plan.estimator)
    if not rewards.numel():
        raise ValueError("ResponseBatch has no responses; a rollout step must hold at least one group")
    if not bool(rewards.isfinite().all()):
        row = int(torch.nonzero(~rewards.isfinite())[0])
        raise ValueError(f"ResponseBatch.rewards[{row}] = {float(rewards[row])}: rewards must be finite; mend the reward function")
    smallest = int(groups.count.min())
    if smallest < 2 and needs.min_group != 1:
        raise ValueError(
            f"estimator {name} compares the responses of a prompt, but a group has {smallest} response; "
            "sample at least 2 per prompt (batch.responses_per_prompt), or use the estimator signed"
        )
    knob = needs.min_group
    if isinstance(knob, str) and knobs[knob] > smallest:
        raise ValueError(
            f"estimator {name}: {knob} = {knobs[knob]} exceeds a group of {smallest} responses; "
            f"lower estimator.{knob}"
        )
    if isinstance(knob, int) and knob > smallest:
        raise ValueError(
            f"estimator {name} needs groups of at least {knob} responses, but one has {smallest}; "
            "raise batch.responses_per_prompt"
        )
    if needs.unit_rewards and (float(rewards.min()) < 0 or float(rewards.max()) > 1 + ONE):
        low, high = float(rewards.min()), float(rewards.max())
        raise ValueError(
            f"estimator {name} needs rewards in [0, 1] and got [{low:g}, {high:g}]; rescale them by "
            f"(r - {min(low, 0.0):g}) / {max(high, 1.0) - min(low, 0.0):g}, e.g. reward weights that sum to 1 (0.9 and 0.1)"
        )
    _check_fields(batch, plan)


def _check_fields(batch: ResponseBatch, plan: CreditPlan) -> None:
    """Raises ValueError where an optional field that the method reads is missing."""
    knobs = plan.estimator_knobs
    missing = None
    if plan.estimator == "durian" and knobs["perceptual"] and batch.visual_entropy is None:
        missing = "visual_entropy", "estimator durian with perceptual > 0", "give it, or set estimator.perceptual=0 (text-only data)"
    elif plan.estimator == "durian" and knobs["reasoning"] and (batch.mean_logprobs if knobs["normalise"] else batch.sum_logprobs) is None:
        field = "mean_logprobs" if knobs["normalise"] else "sum_logprobs"
        missing = field, "estimator durian with reasoning > 0", "give it, or set estimator.reasoning=0"
    elif plan.kl_in_reward and any(plan.kl_coef) and batch.kl is None:
        missing = "kl", "kl.placement = reward", "give it, or set kl.placement=loss"
    for field, reader in reads_of(plan).items():
        if missing is None and getattr(batch, field) is None:
            missing = field, reader, "give it"
    if missing:
        field, reader, remedy = missing
        raise ValueError(f"ResponseBatch.{field} is missing, but {reader} reads it; {remedy}")
