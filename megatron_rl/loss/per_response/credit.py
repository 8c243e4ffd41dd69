"""From a batch of responses to advantages and KL weights: estimator, then shapers, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss.batch import Credit, Knobs, Reading, Readings, ResponseBatch
from megatron_rl.loss.choices import ESTIMATORS, KL_WEIGHTS, SHAPERS
from megatron_rl.loss.per_response import filters
from megatron_rl.loss.per_response.advantages import ONE, zscore
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.segments import Segments, lifted, segments_of, where_correct


@dataclass(frozen=True)
class CreditPlan:
    """A method's choices for a rollout step: names and knobs."""

    estimator: str
    estimator_knobs: Knobs
    shaping: tuple[tuple[str, Knobs], ...]
    kl_weights: tuple[str, Knobs]
    kl_in_reward: bool
    kl_coef: tuple[float, float]  # (correct, incorrect)
    drop_all_correct: bool
    eps: float
    ddof: int
    curiosity: Knobs | None = None


def reads_of(plan: CreditPlan) -> Readings:
    """The columns of ResponseBatch that a plan reads, each with who reads it."""
    found: Readings = {}

    def add(columns: Iterable[str], reading: Reading) -> None:
        for name in columns:
            found.setdefault(name, []).append(reading)

    name = plan.estimator
    chosen = ESTIMATORS[name]
    add(chosen.reads, Reading(f"estimator {name}", plan.estimator_knobs))
    if chosen.needs.reads_by_knob is not None:
        for column, knob in chosen.needs.reads_by_knob(**plan.estimator_knobs).items():
            remedy = f"give it, or set estimator.{knob}=0"
            reader = f"estimator {name} with {knob} > 0"
            add([column], Reading(reader, plan.estimator_knobs, remedy))
    for shaper, knobs in plan.shaping:
        add(SHAPERS[shaper].reads, Reading(f"shaper {shaper}", knobs))
    weigh, knobs = plan.kl_weights
    add(KL_WEIGHTS[weigh].reads, Reading(f"KL weight {weigh}", knobs))
    if plan.kl_in_reward and any(plan.kl_coef):
        remedy = "give it, or set kl.placement=loss"
        add(["kl"], Reading("kl.placement = reward", {}, remedy))
    if plan.curiosity is not None:
        remedy = "give it, or set reward_shaping.curiosity=null"
        curious = Reading("reward_shaping.curiosity", plan.curiosity, remedy)
        add(["mean_logprobs", "progress"], curious)
    return found


def credit(batch: ResponseBatch, plan: CreditPlan) -> Credit:
    """Advantages, KL weights and the rows that take part.

    Raises:
        ValueError: the batch lacks what the method reads, or lies outside its domain.
    """
    rewards = lifted(batch.rewards)
    groups = segments_of(batch.group_ids)
    check(batch, rewards, groups, plan)
    evidence = Evidence(
        batch=batch,
        rewards=rewards,
        plain_rewards=rewards,
        groups=groups,
        accuracy=groups.mean(batch.correct.to(rewards.dtype)),
        omega=rewards.mean().clamp(0, 1),
        eps=plan.eps,
        ddof=plan.ddof,
    )
    weigh, knobs = plan.kl_weights
    kl_weights = KL_WEIGHTS[weigh](evidence, knobs)
    if plan.kl_in_reward and any(plan.kl_coef):
        # Only what estimators see: accuracy, omega and successes stay those of the plain rewards.
        coefficient = where_correct(batch.correct, *plan.kl_coef, rewards.dtype)
        shaped = rewards - coefficient * kl_weights * batch.columns["kl"].to(rewards.dtype)
        evidence = replace(evidence, rewards=shaped)
    bonus = _bonus(evidence, plan)
    if bonus is not None:
        evidence = replace(evidence, rewards=evidence.rewards + bonus)
    advantages = ESTIMATORS[plan.estimator](evidence, plan.estimator_knobs)
    check_advantages(f"estimator {plan.estimator}", advantages, rewards)
    for name, knobs in plan.shaping:
        advantages = SHAPERS[name](evidence, knobs, advantages)
        check_advantages(f"shaper {name}", advantages, rewards)
    keep = torch.ones_like(batch.correct)
    if plan.drop_all_correct:
        keep = filters.not_all_correct(batch.correct, groups)
    of_batch = metrics(evidence, advantages, kl_weights, keep)
    if bonus is not None:
        of_batch["credit/curiosity_bonus_mean"] = bonus.mean()
    return Credit(advantages, kl_weights, keep, of_batch, evidence.rewards)


def _bonus(evidence: Evidence, plan: CreditPlan) -> Tensor | None:
    """What is added to the rewards that estimators see."""
    if plan.curiosity is None:
        return None
    rewards = evidence.plain_rewards
    logprobs = evidence.column("mean_logprobs").to(rewards.dtype)
    progress = evidence.column("progress").item()
    return filters.curiosity_bonus(rewards, logprobs, progress, **plan.curiosity)


def metrics(
    evidence: Evidence, advantages: Tensor, kl_weights: Tensor, keep: Tensor
) -> dict[str, Tensor]:
    """What the papers plot, over the whole batch.

    ``length_gap_tokens`` is mean length of incorrect minus mean length of correct responses (0
    when either is missing); an extreme group has one correct or one incorrect response. Of the
    responses of such groups |A| is averaged as it is used, and as the z-score alone would have it
    (0 when there are none).
    """
    groups = evidence.groups
    correct = evidence.correct
    num_correct = groups.sum(correct)
    lengths = evidence.lengths.to(advantages.dtype)
    by_zscore = zscore(evidence.rewards, groups, eps=evidence.eps, ddof=evidence.ddof)

    def share(flags: Tensor) -> Tensor:
        return flags.to(advantages.dtype).mean()

    def mean_of(values: Tensor, rows: Tensor) -> Tensor:
        return (values * rows).sum() / rows.sum().clamp(min=1)

    both = correct.any() & ~correct.all()
    gap = mean_of(lengths, ~correct) - mean_of(lengths, correct)
    extreme = (groups.count > 1) & ((num_correct == 1) | (num_correct == groups.count - 1))
    of_extreme = groups.broadcast(extreme)
    return {
        "credit/zero_spread_group_share": share(groups.spread(evidence.rewards) == 0),
        "credit/extreme_group_share": share(extreme),
        "credit/extreme_advantage_abs_mean": mean_of(advantages.abs(), of_extreme),
        "credit/extreme_zscore_abs_mean": mean_of(by_zscore.abs(), of_extreme),
        "credit/all_correct_group_share": share(num_correct == groups.count),
        "credit/none_correct_group_share": share(num_correct == 0),
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
    expected = f"{tuple(rewards.shape)} {rewards.dtype}"
    returned = type(advantages).__name__
    if isinstance(advantages, Tensor):
        returned = f"{tuple(advantages.shape)} {advantages.dtype}"
    if returned != expected:
        raise ValueError(
            f"{who}: returned {returned}; return a tensor {expected}, one per response"
        )
    finite = advantages.isfinite()
    if not bool(finite.all()):
        row = int(torch.nonzero(~finite)[0])
        raise ValueError(
            f"{who}: the advantage of response {row} is {float(advantages[row])} at a reward of "
            f"{float(rewards[row]):g}; guard its divisors"
        )


def check(batch: ResponseBatch, rewards: Tensor, groups: Segments, plan: CreditPlan) -> None:
    """Raises ValueError where the batch lacks what the method reads or lies outside its domain."""
    if not rewards.numel():
        raise ValueError(
            "ResponseBatch has no responses; a rollout step must hold at least one group"
        )
    if not bool(rewards.isfinite().all()):
        row = int(torch.nonzero(~rewards.isfinite())[0])
        raise ValueError(
            f"ResponseBatch.rewards[{row}] = {float(rewards[row])}: rewards must be finite; fix"
            " the reward function"
        )
    _check_group_size(int(groups.count.min()), plan)
    if ESTIMATORS[plan.estimator].needs.unit_rewards:
        _check_unit_rewards(plan.estimator, float(rewards.min()), float(rewards.max()))
    for name, (reading, *_) in reads_of(plan).items():
        if name not in batch.columns:
            raise ValueError(
                f"ResponseBatch.columns has no {name}, but {reading.reader} reads it;"
                f" {reading.remedy}"
            )


def _check_group_size(smallest: int, plan: CreditPlan) -> None:
    name = plan.estimator
    wanted = ESTIMATORS[name].needs.min_group
    if smallest < 2 and wanted != 1:
        raise ValueError(
            f"estimator {name} compares the responses of a prompt, but a group has {smallest}"
            " response; sample at least 2 per prompt (batch.responses_per_prompt), or use the"
            " estimator signed"
        )
    if isinstance(wanted, str) and plan.estimator_knobs[wanted] > smallest:
        raise ValueError(
            f"estimator {name}: {wanted} = {plan.estimator_knobs[wanted]} exceeds a group of"
            f" {smallest} responses; lower estimator.{wanted}"
        )
    if isinstance(wanted, int) and wanted > smallest:
        raise ValueError(
            f"estimator {name} needs groups of at least {wanted} responses, but one has {smallest};"
            " raise batch.responses_per_prompt"
        )


def _check_unit_rewards(name: str, low: float, high: float) -> None:
    if low >= 0 and high <= 1 + ONE:
        return
    start = min(low, 0.0)
    width = max(high, 1.0) - start
    raise ValueError(
        f"estimator {name} needs rewards in [0, 1] and got [{low:g}, {high:g}]; rescale them by"
        f" (r - {start:g}) / {width:g}, e.g. reward weights that sum to 1 (0.9 and 0.1)"
    )
