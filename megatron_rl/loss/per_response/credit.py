"""From a batch of responses to advantages and KL weights: estimator, then shapers, by name."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss.batch import Credit, Reading, ResponseBatch, given
from megatron_rl.loss.choices import ESTIMATORS, KL_WEIGHTS, SHAPERS
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_response.advantages import ONE, zscore
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.per_response.filters import Curiosity
from megatron_rl.loss.segments import Segments, lifted, segments_of, where_correct


def response_reads(config: MethodConfig) -> Iterator[tuple[str, Reading]]:
    """The columns of ResponseBatch that a method reads, each with its reader."""
    chosen = config.estimator
    yield from ESTIMATORS.readings(chosen)
    by_knob = ESTIMATORS[chosen.name].needs.reads_by_knob
    if by_knob is not None:
        for column, knob in by_knob(**chosen.knobs).items():
            yield column, Reading(f"estimator {chosen.name} with {knob} > 0", chosen.knobs)
    for shaper in config.shaping.values():
        yield from SHAPERS.readings(shaper)
    yield from KL_WEIGHTS.readings(config.kl.weights)
    if config.kl.in_reward:
        yield "kl", Reading("kl.placement = reward", {})
    if config.reward_shaping.curiosity is not None:
        for column in Curiosity.reads:
            yield column, Reading("reward_shaping.curiosity", {})
    given_rows = config.filters.demonstrations
    for column in () if given_rows is None else given_rows.reads:
        yield column, Reading("filters.demonstrations", {})


def credit(batch: ResponseBatch, config: MethodConfig) -> Credit:
    """Advantages, KL weights and the rows that take part.

    Raises:
        ValueError: the batch lacks what the method reads, or lies outside its domain.
    """
    rewards = lifted(batch.rewards)
    groups = segments_of(batch.group_ids)
    chosen = config.filters.demonstrations
    if chosen is not None:
        columns = [given(batch.columns.get(name), "ResponseBatch", name) for name in chosen.reads]
        rows = chosen.rows(*columns, groups)
        if not rows.all():
            return _of_rows(rows, rewards, credit(batch.take(rows), config))
    check(rewards, groups, config)
    evidence = Evidence(
        batch=batch,
        rewards=rewards,
        plain_rewards=rewards,
        groups=groups,
        accuracy=groups.mean(batch.correct.to(rewards.dtype)),
        omega=rewards.mean().clamp(0, 1),
        eps=config.eps,
        ddof=config.std_ddof,
    )
    kl_weights = KL_WEIGHTS.value(config.kl.weights, evidence)
    if config.kl.in_reward:
        # Only what estimators see: accuracy, omega and successes stay those of the plain rewards.
        coefficient = where_correct(batch.correct, *config.kl.by_sign, rewards.dtype)
        shaped = rewards - coefficient * kl_weights * evidence.column("kl").to(rewards.dtype)
        evidence = replace(evidence, rewards=shaped)
    bonus: Tensor | None = None
    if (curiosity := config.reward_shaping.curiosity) is not None:
        logprobs = evidence.column("mean_logprobs").to(rewards.dtype)
        bonus = curiosity.bonus(rewards, logprobs, evidence.column("progress").item())
        evidence = replace(evidence, rewards=evidence.rewards + bonus)
    advantages = ESTIMATORS.value(config.estimator, evidence)
    check_advantages(f"estimator {config.estimator.name}", advantages, rewards)
    for name, shaper in config.shaping.items():
        advantages = SHAPERS.value(shaper, evidence, advantages=advantages)
        check_advantages(f"shaper {name}", advantages, rewards)
    keep = torch.ones_like(batch.correct)
    if config.filters.drop_all_correct:
        keep = groups.broadcast(groups.sum(batch.correct) < groups.count)
    of_batch = metrics(evidence, advantages, kl_weights, keep)
    if bonus is not None:
        of_batch["credit/curiosity_bonus_mean"] = bonus.mean()
    return Credit(advantages, kl_weights, keep, of_batch, evidence.rewards)


def _of_rows(rows: Tensor, rewards: Tensor, part: Credit) -> Credit:
    """The credit of all rows from ``part``, that of some: the others have 0 and are not kept."""

    def placed(values: Tensor) -> Tensor:
        return torch.zeros_like(rows, dtype=values.dtype).masked_scatter(rows, values)

    assert part.rewards is not None
    seen = rewards.masked_scatter(rows, part.rewards)
    columns = [placed(each) for each in (part.advantages, part.kl_weights, part.keep)]
    return Credit(*columns, part.metrics, seen)


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


def check(rewards: Tensor, groups: Segments, config: MethodConfig) -> None:
    """Raises ValueError where the rewards lie outside the method's domain."""
    name = config.estimator.name
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
    smallest = int(groups.count.min())
    if smallest < config.min_group:
        raise ValueError(
            f"estimator {name} compares the responses of a prompt and needs at least"
            f" {config.min_group}, but a group has {smallest}; raise batch.responses_per_prompt, or"
            " choose another estimator (signed needs 1)"
        )
    low, high = float(rewards.min()), float(rewards.max())
    readers = list(config.unit_reward_readers)
    if readers and (low < 0 or high > 1 + ONE):
        start = min(low, 0.0)
        width = max(high, 1.0) - start
        raise ValueError(
            f"{readers[0]} needs rewards in [0, 1] and got [{low:g}, {high:g}]; rescale them by"
            f" (r - {start:g}) / {width:g}, e.g. reward weights that sum to 1 (0.9 and 0.1)"
        )
