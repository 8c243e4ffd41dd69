"""Advantage estimators: rewards of a batch of groups -> one advantage per response.

Notation of the docstrings: r_i reward, G group size, L_i response tokens, p share of correct
responses of the group (its *accuracy*), mean and std over the group with divisor G - ddof. A group
without spread (max r = min r) gets exactly 0 unless said otherwise: the test is on the spread
because a std of equal float32 numbers need not be 0. eps is added to a std, or to a mean used as
divisor; divisors that can only be 0 in closed form (tree, pass_at_k) are guarded by 0 instead.

An estimator is one function here: inputs before the star, knobs after it (see ``choices.py``).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from megatron_rl.loss.choices import estimator
from megatron_rl.loss.per_response.evidence import Evidence
from megatron_rl.loss.segments import Segments, segments_of, where_correct
from megatron_rl.loss.shapes import PerGroup, PerResponse, ResponseCounts, ResponseFlags

ONE = 1e-6  # a total reward this close to 1 is 1: it is a sum of weighted parts


@estimator()
def zscore(rewards: PerResponse, groups: Segments, eps: float, ddof: int) -> PerResponse:
    """(r_i - mean) / (std + eps).

    Source: GRPO (arXiv 2402.03300) section 4.1.2. verl and EasyR1 use ddof 1.
    """
    return over(centered(rewards, groups), groups.broadcast(groups.std(rewards, ddof)) + eps)


@estimator()
def centered(rewards: PerResponse, groups: Segments) -> PerResponse:
    """r_i - mean. Source: Dr. GRPO (arXiv 2503.20783)."""
    return _where_spread(rewards, groups, rewards - groups.broadcast(groups.mean(rewards)))


@estimator()
def rloo(rewards: PerResponse, groups: Segments) -> PerResponse:
    """r_i - mean of the other responses = G / (G - 1) (r_i - mean).

    Source: RLOO (arXiv 2402.14740).
    """
    size = groups.count.to(rewards.dtype)
    return centered(rewards, groups) * groups.broadcast(size / (size - 1).clamp(min=1))


@estimator()
def opo(rewards: PerResponse, lengths: ResponseCounts, groups: Segments) -> PerResponse:
    """r_i - sum(L r) / sum(L), the length-weighted baseline. Source: OPO (arXiv 2505.23585)."""
    tokens = lengths.to(rewards.dtype)
    baseline = groups.sum(tokens * rewards) / groups.sum(tokens).clamp(min=1)
    return _where_spread(rewards, groups, rewards - groups.broadcast(baseline))


@estimator()
def reinforce_pp_baseline(
    rewards: PerResponse, lengths: ResponseCounts, groups: Segments
) -> PerResponse:
    """(a_i - m) / sqrt(v + 1e-8), a_i = r_i - group mean, whitened over the batch's tokens.

    m and v are mean and unbiased variance of a over all response tokens of the batch. Groups
    without spread are whitened like the others (a = 0 becomes -m / sqrt(v)).
    Source: REINFORCE++ (arXiv 2501.03262) section 3; constants of whitening: its released code.
    """
    deviation = centered(rewards, groups)
    tokens = lengths.to(rewards.dtype)
    num_tokens = tokens.sum()
    mean = (tokens * deviation).sum() / num_tokens.clamp(min=1)
    variance = (tokens * (deviation - mean).square()).sum() / (num_tokens - 1).clamp(min=1)
    return (deviation - mean) * torch.rsqrt(variance + 1e-8)


@estimator()
def gpg(rewards: PerResponse, groups: Segments) -> PerResponse:
    """B / (B - M) (r_i - mean): B responses in the batch, M of them in groups without spread.

    0 if B = M. Source: GPG (arXiv 2504.02546).
    """
    flat = groups.spread(rewards) == 0
    informative = (rewards.numel() - groups.count[flat].sum()).to(rewards.dtype)
    return centered(rewards, groups) * (rewards.numel() / informative.clamp(min=1))


@estimator(unit_rewards=True)
def tree(rewards: PerResponse, groups: Segments) -> PerResponse:
    """(r_i - mu) / (mu (1 - mu)), 0 where mu is 0 or 1; mu the group mean, rewards in [0, 1].

    Source: TreeRPO (arXiv 2506.05183), as in MAPO (arXiv 2509.18849) fig. 3.
    """
    mean = groups.broadcast(groups.mean(rewards))
    return over(centered(rewards, groups), mean * (1 - mean))


@estimator(min_group=1)  # a group of one has a meaning: its reward beside the filter's prior
def krpo(
    rewards: PerResponse,
    groups: Segments,
    *,
    initial_mean: float = 0.0,
    initial_variance: PositiveFloat = 1.0,
    process_noise: NonNegativeFloat = 1e-5,
    measurement_noise: PositiveFloat = 1e-2,
) -> PerResponse:
    """(r_i - x_i) / (sqrt(P_i) + 1e-8); x_i, P_i: Kalman filter after rewards 1..i of the group.

    P' = P + process_noise; K = P' / (P' + measurement_noise); x = x + K (r - x); P = (1 - K) P'.
    Rollout order matters: this is the one estimator that is not permutation-equivariant. Groups
    without spread are filtered like the others.
    Source: KRPO (arXiv 2505.07527).
    """
    position = groups.position()
    order = torch.argsort(position, stable=True)
    mean = torch.full((groups.num,), initial_mean, dtype=rewards.dtype, device=rewards.device)
    variance = initial_variance
    advantages = torch.empty_like(rewards)
    # One step of all filters at once: the first response of every group, then the second, ...
    for rows in torch.split(order, torch.bincount(position).tolist()):
        at = groups.index[rows]
        prior = variance + process_noise
        gain = prior / (prior + measurement_noise)
        mean[at] = mean[at] + gain * (rewards[rows] - mean[at])
        variance = (1 - gain) * prior
        advantages[rows] = (rewards[rows] - mean[at]) / (variance**0.5 + 1e-8)
    return advantages


@estimator(min_group=1)
def signed(
    correct: ResponseFlags,
    dtype: torch.dtype,
    *,
    positive: NonNegativeFloat,
    negative: NonNegativeFloat,
) -> PerResponse:
    """+positive if correct else -negative; no baseline, so a group without spread keeps its sign.

    Source: arXiv 2506.01347 section 3: PSR (1, 0), NSR (0, 1), W-REINFORCE (0.1, 1).
    """
    return where_correct(correct, positive, 0 - negative, dtype)


@estimator()
def lead(
    correct: ResponseFlags,
    lengths: ResponseCounts,
    accuracy: PerGroup,
    groups: Segments,
    eps: float,
    ddof: int,
    *,
    length_decay: NonNegativeFloat = 0.05,
    incorrect_reward: float = -1.0,
    weight_floor: NonNegativeFloat = 0.4,
    weight_range: NonNegativeFloat = 1.1,
    weight_slope: float = 10.0,
    weight_midpoint: Annotated[float, Field(ge=0, le=1)] = 0.75,
) -> PerResponse:
    """A_i w(p) if A_i > 0 else A_i w(1 - p), with A = zscore(R).

    R_i = exp(-length_decay z_i) if correct else incorrect_reward,
    w(x) = weight_floor + weight_range / (1 + exp(weight_slope (x - weight_midpoint))),
    z_i = (L_i - mean) / (std + 1e-6) over the correct responses of the group (sample std; 1 for a
    single one). It reads correctness and lengths, not the reward.
    Source: GRPO-LEAD (arXiv 2504.09696).
    """
    tokens = lengths.to(accuracy.dtype)
    num_correct = groups.sum(correct)
    mean = groups.sum(tokens * correct) / num_correct.clamp(min=1)
    deviation = torch.where(correct, tokens - groups.broadcast(mean), torch.zeros_like(tokens))
    std = (groups.sum(deviation.square()) / (num_correct - 1).clamp(min=1)).sqrt()
    std = torch.where(num_correct == 1, torch.ones_like(std), std)
    standardized = deviation / (groups.broadcast(std) + 1e-6)
    incorrect = torch.full_like(tokens, incorrect_reward)
    shaped = torch.where(correct, (-length_decay * standardized).exp(), incorrect)
    advantages = zscore(shaped, groups, eps, ddof)
    share = groups.broadcast(accuracy)
    argument = torch.where(advantages > 0, share, 1 - share)
    # 1 / (1 + exp(x)) is the sigmoid of -x.
    sigmoid = torch.sigmoid(-weight_slope * (argument - weight_midpoint))
    return advantages * (weight_floor + weight_range * sigmoid)


def _one_is_reached(largest: float, *, success: str) -> tuple[str, str] | None:
    if success == "correct" or abs(largest - 1) <= ONE:
        return None
    problem = "success = reward_is_one: no response can reach a reward of exactly 1"
    return problem, "success=correct"


@estimator(unit_rewards=True, check_rewards=_one_is_reached)
def mixed(
    rewards: PerResponse,
    plain_rewards: PerResponse,
    correct: ResponseFlags,
    groups: Segments,
    eps: float,
    ddof: int,
    *,
    success: Literal["reward_is_one", "correct"] = "reward_is_one",
) -> PerResponse:
    """(1 - l) zscore + l apd, l = 1 - 4 p (1 - p), p the share of successes of the group.

    A success is a total reward of exactly 1, as in the paper (eq. 3), or a correct response. The
    total is taken before a KL in the reward, which would leave no success at all. Its fig. 3
    prints the two weights exchanged.
    Source: MAPO (arXiv 2509.18849) eq. 5-6.
    """
    succeeded = correct if success == "correct" else (plain_rewards - 1).abs() <= ONE
    share = groups.mean(succeeded.to(rewards.dtype))
    certainty = groups.broadcast(1 - 4 * share * (1 - share))
    by_std = zscore(rewards, groups, eps, ddof)
    by_mean = apd(rewards, groups, eps)
    return (1 - certainty) * by_std + certainty * by_mean


@estimator(unit_rewards=True)
def apd(rewards: PerResponse, groups: Segments, eps: float) -> PerResponse:
    """(r_i - mu) / (mu + eps): advantage percent deviation, rewards in [0, 1].

    Source: MAPO (arXiv 2509.18849) eq. 4.
    """
    return over(centered(rewards, groups), groups.broadcast(groups.mean(rewards)) + eps)


def _durian_reads(
    *, perceptual: float, reasoning: float, normalize: bool, **_: Any
) -> Mapping[str, str]:
    confidence = "mean_logprobs" if normalize else "sum_logprobs"
    fields = {"visual_entropy": ("perceptual", perceptual), confidence: ("reasoning", reasoning)}
    return {field: knob for field, (knob, weight) in fields.items() if weight}


def _durian_weights(*, group: float, perceptual: float, reasoning: float, **_: Any) -> str | None:
    if group + perceptual + reasoning > 0:
        return None
    return "group, perceptual and reasoning are all 0, so is every advantage"


@estimator(reads_by_knob=_durian_reads, check_knobs=_durian_weights)
def durian(
    evidence: Evidence,
    *,
    group: NonNegativeFloat = 0.6,
    perceptual: NonNegativeFloat = 0.2,
    reasoning: NonNegativeFloat = 0.2,
    reasoning_bins: PositiveInt = 12,
    normalize: bool = True,
) -> PerResponse:
    """group zscore + perceptual A_p + reasoning A_r, A_b = (r_i - own group mean) / (s_b + eps).

    s_b is the sample std of all rewards in the bucket b around the bucket's mean; A_b is 0 in a
    bucket with s_b = 0 or a single reward. Buckets are over the prompts of the batch: of visual
    entropy (lower quarter, middle, upper quarter; ties go down), and ``reasoning_bins`` quantile
    bins of the prompt's mean confidence. Confidence is the mean token logprob of a response; with
    ``normalize`` false the sum, as printed.
    Source: Durian (arXiv 2602.21743) eq. 10-20; the knobs are its a_o, a_p, a_r.
    """
    rewards = evidence.rewards
    groups = evidence.groups
    total = group * zscore(rewards, groups, evidence.eps, evidence.ddof)
    if perceptual:
        buckets = quarters(groups.mean(evidence.column("visual_entropy").to(rewards.dtype)))
        total = total + perceptual * _bucketed(rewards, groups, buckets, evidence.eps)
    if reasoning:
        confidence = evidence.column("mean_logprobs" if normalize else "sum_logprobs")
        buckets = quantile_bins(groups.mean(confidence.to(rewards.dtype)), reasoning_bins)
        total = total + reasoning * _bucketed(rewards, groups, buckets, evidence.eps)
    return total


def quarters(entropy: PerGroup) -> Int[Tensor, " groups"]:
    """0 where entropy <= its first quartile, else 2 where >= the third, else 1.

    Quantiles are interpolated linearly.
    """
    low = entropy.quantile(0.25)
    high = entropy.quantile(0.75)
    return torch.where(entropy <= low, 0, torch.where(entropy >= high, 2, 1))


def quantile_bins(values: PerGroup, bins: int) -> Int[Tensor, " groups"]:
    """Index of [q_j, q_{j+1}) holding the value, q the j / bins quantiles; the last is closed."""
    inner = torch.linspace(0, 1, bins + 1, dtype=values.dtype, device=values.device)[1:-1]
    # A value on an edge is in the bin above it.
    return torch.bucketize(values, values.quantile(inner), right=True)


def _bucketed(rewards: Tensor, groups: Segments, bucket_of_group: Tensor, eps: float) -> Tensor:
    """(r_i - own group mean) / (std of the bucket + eps), 0 in a bucket without spread."""
    buckets = segments_of(groups.broadcast(bucket_of_group))
    usable = (buckets.count > 1) & (buckets.spread(rewards) > 0)
    ones = torch.ones_like(usable, dtype=rewards.dtype)
    scale = torch.where(usable, buckets.std(rewards, 1) + eps, ones)
    scaled = centered(rewards, groups) / buckets.broadcast(scale)
    return torch.where(buckets.broadcast(usable), scaled, torch.zeros_like(rewards))


@estimator(min_group="k")
def pass_at_k(
    correct: ResponseFlags, dtype: torch.dtype, groups: Segments, *, k: PositiveInt = 4
) -> PerResponse:
    """(1 - R) / s if correct else (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / s; 0 if s = 0.

    R = 1 - C(W, k) / C(N, k) is the expected best of k and s = sqrt(R (1 - R)), for N responses of
    which W are wrong.
    Source: Pass@k training (arXiv 2508.10751), analytic form.
    """
    size = groups.count.to(dtype)
    wrong = size - groups.sum(correct).to(dtype)
    # 1 - R: the chance that all of k are wrong.
    none_right = _choose_ratio(wrong, size, k)
    spread = ((1 - none_right) * none_right).sqrt()
    positive = none_right
    negative = none_right - _choose_ratio(wrong - 1, size - 1, k - 1)
    value = torch.where(correct, groups.broadcast(positive), groups.broadcast(negative))
    return over(value, groups.broadcast(spread))


def _choose_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k) as a product of k factors; 0 where part < k."""
    result = torch.ones_like(whole)
    for j in range(k):
        result = result * ((part - j).clamp(min=0) / (whole - j).clamp(min=1))
    return result


def _where_spread(rewards: Tensor, groups: Segments, advantages: Tensor) -> Tensor:
    """``advantages``, but exactly 0 in groups without spread."""
    spread = groups.broadcast(groups.spread(rewards) > 0)
    return torch.where(spread, advantages, torch.zeros_like(advantages))


def over(values: Tensor, divisor: Tensor) -> Tensor:
    """values / divisor, 0 where the divisor is 0."""
    usable = divisor != 0
    # The branch that is not taken must stay finite, or its gradient would be NaN.
    quotient = values / torch.where(usable, divisor, torch.ones_like(divisor))
    return torch.where(usable, quotient, torch.zeros_like(values))
