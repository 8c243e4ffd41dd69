"""Advantage estimators: rewards of a batch of groups -> one advantage per response.

Notation of the docstrings: r_i reward, G group size, L_i response tokens, p share of correct responses of the group (its
*accuracy*), mean and std over the group with divisor G - ddof. A group without spread (max r = min r) gets exactly 0 unless
said otherwise: the test is on the spread because a std of equal fp32 numbers need not be 0. eps is added to a std, or to a mean
used as divisor; divisors that can only be 0 in closed form (tree, pass_at_k) are guarded by 0 instead.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.loss.segments import Segments, segments_of, where_correct


def centered(rewards: Float[Tensor, " responses"], groups: Segments) -> Float[Tensor, " responses"]:
    """r_i - mean. Source: Dr. GRPO (arXiv 2503.20783)."""
    return _where_spread(rewards, groups, rewards - groups.broadcast(groups.mean(rewards)))


def zscore(rewards: Float[Tensor, " responses"], groups: Segments, *, eps: float, ddof: int) -> Float[Tensor, " responses"]:
    """(r_i - mean) / (std + eps). Source: GRPO (arXiv 2402.03300) section 4.1.2. verl and EasyR1 have ddof 1."""
    return _over(centered(rewards, groups), groups.broadcast(groups.std(rewards, ddof)) + eps)


def rloo(rewards: Float[Tensor, " responses"], groups: Segments) -> Float[Tensor, " responses"]:
    """r_i - mean of the other responses = G / (G - 1) (r_i - mean). Source: RLOO (arXiv 2402.14740)."""
    size = groups.count.to(rewards.dtype)
    return centered(rewards, groups) * groups.broadcast(size / (size - 1).clamp(min=1))


def opo(rewards: Float[Tensor, " responses"], response_tokens: Int[Tensor, " responses"], groups: Segments) -> Float[Tensor, " responses"]:
    """r_i - sum(L r) / sum(L), the length-weighted baseline. Source: OPO (arXiv 2505.23585)."""
    lengths = response_tokens.to(rewards.dtype)
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return _where_spread(rewards, groups, rewards - groups.broadcast(baseline))


def reinforce_pp_baseline(
    rewards: Float[Tensor, " responses"], response_tokens: Int[Tensor, " responses"], groups: Segments
) -> Float[Tensor, " responses"]:
    """(a_i - m) / sqrt(v + 1e-8) with a_i = r_i - group mean; m and v are mean and unbiased variance of a over all response
    tokens of the batch. Groups without spread are whitened like the others (a = 0 becomes -m / sqrt(v)).

    Source: REINFORCE++ (arXiv 2501.03262) section 3; the whitening constants are those of its released code.
    """
    centred = centered(rewards, groups)
    lengths = response_tokens.to(rewards.dtype)
    tokens = lengths.sum()
    mean = (lengths * centred).sum() / tokens.clamp(min=1)
    variance = (lengths * (centred - mean).square()).sum() / (tokens - 1).clamp(min=1)
    return (centred - mean) * torch.rsqrt(variance + 1e-8)


def gpg(rewards: Float[Tensor, " responses"], groups: Segments) -> Float[Tensor, " responses"]:
    """alpha (r_i - mean), alpha = B / (B - M): B responses in the batch, M of them in groups without spread; 0 if B = M.

    Source: GPG (arXiv 2504.02546).
    """
    flat = groups.spread(rewards) == 0
    informative = (rewards.numel() - groups.count[flat].sum()).to(rewards.dtype)
    return centered(rewards, groups) * (rewards.numel() / informative.clamp(min=1))


def tree(rewards: Float[Tensor, " responses"], groups: Segments) -> Float[Tensor, " responses"]:
    """(r_i - mu) / (mu (1 - mu)), 0 where mu is 0 or 1; mu the group mean, rewards in [0, 1].

    Source: TreeRPO (arXiv 2506.05183), as in MAPO (arXiv 2509.18849) fig. 3.
    """
    mean = groups.broadcast(groups.mean(rewards))
    return _over(centered(rewards, groups), mean * (1 - mean))


def apd(rewards: Float[Tensor, " responses"], groups: Segments, *, eps: float) -> Float[Tensor, " responses"]:
    """(r_i - mu) / (mu + eps): advantage percent deviation, rewards in [0, 1]. Source: MAPO (arXiv 2509.18849) eq. 4."""
    return _over(centered(rewards, groups), groups.broadcast(groups.mean(rewards)) + eps)


def mixed(
    rewards: Float[Tensor, " responses"], success: Float[Tensor, " groups"], groups: Segments, *, eps: float, ddof: int
) -> Float[Tensor, " responses"]:
    """(1 - l) zscore + l apd, l = 1 - 4 p (1 - p), p = success share of the group. Source: MAPO (arXiv 2509.18849) eq. 5-6.

    The paper counts a success where the total reward is exactly 1 (eq. 3). Its fig. 3 prints the two weights exchanged.
    """
    certainty = groups.broadcast(1 - 4 * success * (1 - success))
    return (1 - certainty) * zscore(rewards, groups, eps=eps, ddof=ddof) + certainty * apd(rewards, groups, eps=eps)


def krpo(
    rewards: Float[Tensor, " responses"],
    groups: Segments,
    *,
    initial_mean: float = 0.0,
    initial_variance: float = 1.0,
    process_noise: float = 1e-5,
    measurement_noise: float = 1e-2,
) -> Float[Tensor, " responses"]:
    """(r_i - x_i) / (sqrt(P_i) + 1e-8): x_i, P_i are the posterior of a Kalman filter after rewards 1..i of the group.

    P' = P + process_noise; K = P' / (P' + measurement_noise); x = x + K (r - x); P = (1 - K) P'. Rollout order matters: this
    is the one estimator that is not permutation-equivariant. Groups without spread are filtered like the others.
    Source: KRPO (arXiv 2505.07527).
    """
    position = groups.position()
    order = torch.argsort(position, stable=True)
    mean = torch.full((groups.num,), initial_mean, dtype=rewards.dtype, device=rewards.device)
    variance = initial_variance
    advantages = torch.empty_like(rewards)
    for rows in torch.split(order, torch.bincount(position).tolist()):
        at = groups.index[rows]
        prior = variance + process_noise
        gain = prior / (prior + measurement_noise)
        mean[at] = mean[at] + gain * (rewards[rows] - mean[at])
        variance = (1 - gain) * prior
        advantages[rows] = (rewards[rows] - mean[at]) / (variance**0.5 + 1e-8)
    return advantages


def signed(correct: Bool[Tensor, " responses"], dtype: torch.dtype, *, positive: float, negative: float) -> Float[Tensor, " responses"]:
    """+positive if correct else -negative; no baseline, so a group without spread keeps its sign.

    Source: arXiv 2506.01347 section 3: PSR (1, 0), NSR (0, 1), W-REINFORCE (0.1, 1).
    """
    return where_correct(correct, positive, 0 - negative, dtype)


def lead(
    correct: Bool[Tensor, " responses"],
    response_tokens: Int[Tensor, " responses"],
    accuracy: Float[Tensor, " groups"],
    groups: Segments,
    *,
    eps: float,
    ddof: int,
    length_decay: float = 0.05,
    incorrect_reward: float = -1.0,
    weight_floor: float = 0.4,
    weight_range: float = 1.1,
    weight_slope: float = 10.0,
    weight_midpoint: float = 0.75,
) -> Float[Tensor, " responses"]:
    """z-score of R_i times w(p) if positive else w(1 - p), w(x) = floor + range / (1 + exp(slope (x - midpoint))).

    R_i = exp(-length_decay z_i) if correct else incorrect_reward, z_i = (L_i - mean) / (std + 1e-6) over the correct responses
    of the group (sample std; 1 for a single one). It reads correctness and lengths, not the reward.
    Source: GRPO-LEAD (arXiv 2504.09696).
    """
    lengths = response_tokens.to(accuracy.dtype)
    num = groups.sum(correct)
    mean = groups.sum(lengths * correct) / num.clamp(min=1)
    deviation = torch.where(correct, lengths - groups.broadcast(mean), torch.zeros_like(lengths))
    std = (groups.sum(deviation.square()) / (num - 1).clamp(min=1)).sqrt()
    std = torch.where(num == 1, torch.ones_like(std), std)
    standardised = deviation / (groups.broadcast(std) + 1e-6)
    shaped = torch.where(correct, (-length_decay * standardised).exp(), torch.full_like(lengths, incorrect_reward))
    advantages = zscore(shaped, groups, eps=eps, ddof=ddof)
    share = groups.broadcast(accuracy)
    argument = torch.where(advantages > 0, share, 1 - share)
    return advantages * (weight_floor + weight_range * torch.sigmoid(-weight_slope * (argument - weight_midpoint)))


def pass_at_k(correct: Bool[Tensor, " responses"], dtype: torch.dtype, groups: Segments, *, k: int) -> Float[Tensor, " responses"]:
    """A+ = (1 - R) / s for correct, A- = (1 - R - C(N- - 1, k - 1) / C(N - 1, k - 1)) / s for incorrect responses; 0 if s = 0.

    R = 1 - C(N-, k) / C(N, k) is the expected best of k, s = sqrt(R (1 - R)), N responses of which N- are incorrect.
    Source: Pass@k training (arXiv 2508.10751), analytic form.
    """
    size = groups.count.to(dtype)
    wrong = size - groups.sum(correct).to(dtype)
    none_right = _choose_ratio(wrong, size, k)
    spread = ((1 - none_right) * none_right).sqrt()
    positive = none_right
    negative = none_right - _choose_ratio(wrong - 1, size - 1, k - 1)
    value = torch.where(correct, groups.broadcast(positive), groups.broadcast(negative))
    return _over(value, groups.broadcast(spread))


def durian(
    rewards: Float[Tensor, " responses"],
    confidence: Float[Tensor, " responses"],
    visual_entropy: Float[Tensor, " responses"] | None,
    groups: Segments,
    *,
    group: float,
    perceptual: float,
    reasoning: float,
    reasoning_bins: int,
    eps: float,
    ddof: int,
) -> Float[Tensor, " responses"]:
    """group zscore + perceptual A_p + reasoning A_r; A_b = (r_i - own group mean) / (s + eps) with s the sample std of all
    rewards in the bucket around the bucket's mean (0 for a bucket with s = 0 or a single reward).

    Buckets are over the prompts of the batch: of visual entropy (lower quarter, middle, upper quarter; ties go down), and
    ``reasoning_bins`` quantile bins of the prompt's mean ``confidence``. Source: Durian (arXiv 2602.21743) eq. 10-20.
    """
    total = group * zscore(rewards, groups, eps=eps, ddof=ddof)
    if perceptual:
        assert visual_entropy is not None
        total = total + perceptual * _bucketed(rewards, groups, quarters(groups.mean(visual_entropy)), eps)
    if reasoning:
        total = total + reasoning * _bucketed(rewards, groups, quantile_bins(groups.mean(confidence), reasoning_bins), eps)
    return total


def quarters(entropy: Float[Tensor, " groups"]) -> Int[Tensor, " groups"]:
    """0 where entropy <= its first quartile, else 2 where >= the third, else 1 (linearly interpolated quantiles)."""
    low, high = entropy.quantile(0.25), entropy.quantile(0.75)
    return torch.where(entropy <= low, 0, torch.where(entropy >= high, 2, 1))


def quantile_bins(values: Float[Tensor, " groups"], bins: int) -> Int[Tensor, " groups"]:
    """Index of [q_j, q_{j+1}) holding the value, q the j / bins quantiles; the last bin is closed."""
    inner = torch.linspace(0, 1, bins + 1, dtype=values.dtype, device=values.device)[1:-1]
    return torch.bucketize(values, values.quantile(inner), right=True)


def _bucketed(rewards: Tensor, groups: Segments, bucket_of_group: Tensor, eps: float) -> Tensor:
    buckets = segments_of(groups.broadcast(bucket_of_group))
    usable = (buckets.count > 1) & (buckets.spread(rewards) > 0)
    scale = torch.where(usable, buckets.std(rewards, 1) + eps, torch.ones_like(usable, dtype=rewards.dtype))
    return torch.where(buckets.broadcast(usable), centered(rewards, groups) / buckets.broadcast(scale), torch.zeros_like(rewards))


def _where_spread(rewards: Tensor, groups: Segments, advantages: Tensor) -> Tensor:
    """``advantages``, but exactly 0 in groups without spread."""
    return torch.where(groups.broadcast(groups.spread(rewards) > 0), advantages, torch.zeros_like(advantages))


def _over(values: Tensor, divisor: Tensor) -> Tensor:
    """values / divisor, 0 where the divisor is 0."""
    usable = divisor != 0
    return torch.where(usable, values / torch.where(usable, divisor, torch.ones_like(divisor)), torch.zeros_like(values))


def _choose_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k) as a product of k factors; 0 where part < k."""
    result = torch.ones_like(whole)
    for j in range(k):
        result = result * ((part - j).clamp(min=0) / (whole - j).clamp(min=1))
    return result
