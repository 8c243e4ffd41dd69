"""Estimators against values worked out by hand from the equations. eps is 0 unless the case is
about eps."""

import torch

from megatron_rl.loss.per_response import advantages as adv
from megatron_rl.loss.segments import segments_of
from tests.unit.loss.groups import evidence, flags, ragged, same, vector

MIXED = [1.0, 0.0, 0.0, 1.0]
RIGHT = [1.0] * 4
WRONG = [0.0] * 4
ONE_OF_8 = [1.0] + [0.0] * 7
SEVEN_OF_8 = [1.0] * 7 + [0.0]
FORMAT = [1.5, 0.5, 1.0, 0.0]  # accuracy + 0.5 format: mean 0.75, variance 0.3125
NEGATIVE = [-1.0, 1.0]
THREE = [2.0, 0.0, 1.0]
ROOT7 = 7**0.5


def test_zscore_by_hand() -> None:
    rewards, groups = ragged(MIXED, RIGHT, WRONG, ONE_OF_8, SEVEN_OF_8, FORMAT, NEGATIVE, THREE)
    expected = [1, -1, -1, 1, *[0] * 8, ROOT7, *[-1 / ROOT7] * 7, *[1 / ROOT7] * 7, -ROOT7]
    expected += [1.341641, -0.447214, 0.447214, -1.341641, -1, 1, 1.224745, -1.224745, 0]
    same(adv.zscore(rewards, groups, eps=0.0, ddof=0), *expected)


def test_zscore_divisor_and_eps() -> None:
    rewards, groups = ragged(MIXED)
    sample = adv.zscore(rewards, groups, eps=0.0, ddof=1)
    same(sample, 0.866025, -0.866025, -0.866025, 0.866025)
    damped = adv.zscore(rewards, groups, eps=0.1, ddof=0)
    same(damped, 0.833333, -0.833333, -0.833333, 0.833333)


def test_no_spread_is_exactly_zero_in_float32() -> None:
    rewards = torch.full((7,), 0.7)
    groups = segments_of(torch.zeros(7, dtype=torch.int64))
    assert adv.zscore(rewards, groups, eps=0.0, ddof=0).tolist() == [0.0] * 7
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    for found in (
        adv.centered(rewards, groups),
        adv.rloo(rewards, groups),
        adv.opo(rewards, lengths, groups),
        adv.gpg(rewards, groups),
    ):
        assert found.tolist() == [0.0] * 7
    assert adv.tree(rewards, groups).tolist() == [0.0] * 7
    assert adv.apd(rewards, groups, eps=0.0).tolist() == [0.0] * 7


def test_groups_need_not_be_contiguous() -> None:
    groups = segments_of(torch.tensor([9, 4, 9, 4]))
    same(adv.centered(vector(1, 5, 0, 7), groups), 0.5, -1, -0.5, 1)


def test_centered_by_hand() -> None:
    rewards, groups = ragged(MIXED, RIGHT, ONE_OF_8, FORMAT, NEGATIVE)
    expected = [0.5, -0.5, -0.5, 0.5, *[0] * 4, 0.875, *[-0.125] * 7]
    expected += [0.75, -0.25, 0.25, -0.75, -1, 1]
    same(adv.centered(rewards, groups), *expected)


def test_rloo_by_hand() -> None:
    """Leave-one-out means: for [2, 0, 1] they are 0.5, 1.5 and 1."""
    rewards, groups = ragged(MIXED, THREE, NEGATIVE, WRONG)
    same(adv.rloo(rewards, groups), 2 / 3, -2 / 3, -2 / 3, 2 / 3, 1.5, -1.5, 0, -2, 2, *[0] * 4)


def test_opo_by_hand() -> None:
    rewards, groups = ragged(MIXED, [1.0, 0.0], RIGHT)
    lengths = torch.tensor([4, 2, 1, 1, 1, 9999, 1, 2, 3, 4])
    same(adv.opo(rewards, lengths, groups), 0.375, -0.625, -0.625, 0.375, 0.9999, -0.0001, *[0] * 4)


def test_reinforce_pp_baseline_by_hand() -> None:
    """a = [.5, -.5, 0, 0] over 8 tokens: mean -1/8, unbiased variance 0.875 / 7 = 1/8."""
    rewards, groups = ragged([1.0, 0.0], [1.0, 1.0])
    found = adv.reinforce_pp_baseline(rewards, torch.tensor([1, 3, 2, 2]), groups)
    same(found, 1.767767, -1.060660, 0.353553, 0.353553)


def test_gpg_by_hand() -> None:
    """8 responses, 6 of them in groups without spread: alpha = 8 / 2."""
    rewards, groups = ragged([1.0, 0.0], [1.0, 1.0], WRONG)
    same(adv.gpg(rewards, groups), 2, -2, *[0] * 6)
    rewards, groups = ragged(RIGHT, WRONG)
    same(adv.gpg(rewards, groups), *[0] * 8)


def test_tree_by_hand() -> None:
    rewards, groups = ragged([1.0, 0.0, 0.0, 0.0], [0.9, 0.1], RIGHT, WRONG)
    same(adv.tree(rewards, groups), 4, *[-4 / 3] * 3, 1.6, -1.6, *[0] * 8)


def test_apd_by_hand() -> None:
    rewards, groups = ragged([1.0, 0.0, 0.0, 0.0], [0.9, 1.0, 1.0, 1.0], WRONG)
    expected = [3, -1, -1, -1, -0.076923, 0.025641, 0.025641, 0.025641, *[0] * 4]
    same(adv.apd(rewards, groups, eps=0.0), *expected, tolerance=1e-6)
    rewards, groups = ragged([1.0, 0.0, 0.0, 0.0])
    same(adv.apd(rewards, groups, eps=0.25), 1.5, -0.5, -0.5, -0.5)


def test_mixed_by_hand() -> None:
    """p = 1/4 and 3/4 give l = 1/4; p = 0 leaves apd alone, p = 1/2 zscore alone."""
    rewards, groups = ragged(
        [1.0, 0.0, 0.0, 0.0], [0.9, 1.0, 1.0, 1.0], [0.9, 0.1, 0.1, 0.1], MIXED
    )
    found = adv.mixed(rewards, rewards, rewards == 1, groups, eps=0.0, ddof=0)
    expected = [2.049038, *[-0.683013] * 3, -1.318269, *[0.439423] * 3, 2, *[-2 / 3] * 3]
    same(found, *expected, 1, -1, -1, 1)


def test_mixed_success_is_of_the_plain_reward_or_of_correctness() -> None:
    """A KL of 0.1 in the reward: mean 0.275, variance 0.171875, zscore 1.507557, apd 2.272727.

    One of four has a plain reward of 1 (l = 1/4), two of four are correct (l = 0).
    """
    rewards, groups = ragged([0.9, 0.4, -0.1, -0.1])
    plain = vector(1, 0.5, 0, 0)
    correct = flags(1, 1, 0, 0)
    by_reward = adv.mixed(rewards, plain, correct, groups, eps=0.0, ddof=0)
    same(by_reward[:1], 1.698850)
    by_correct = adv.mixed(rewards, plain, correct, groups, eps=0.0, ddof=0, success="correct")
    same(by_correct[:1], 1.507557)


def test_krpo_by_hand() -> None:
    """Gains: 1.00001 / 1.01001 = 0.990099, then 0.009911 / 0.019911 = 0.497765; posteriors 0.01
    times the gain."""
    rewards, groups = ragged([1.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    expected = [0.099503, -7.048127, 0, 7.118641, 0.099503, 0.070482]
    same(adv.krpo(rewards, groups), *expected, tolerance=1e-4)


def test_krpo_restarts_for_interleaved_and_ragged_groups() -> None:
    alone = adv.krpo(*ragged([0.2, 0.9, 0.4]))
    groups = segments_of(torch.tensor([1, 0, 1, 1, 0]))
    together = adv.krpo(vector(0.2, 1, 0.9, 0.4, 0), groups)
    same(together[[0, 2, 3]], *alone.tolist())


def test_krpo_knobs() -> None:
    """P' = 2 + 1, gain 3 / (3 + 1); x = 0.5 + 0.75 (1 - 0.5); P = 0.75."""
    rewards, groups = ragged([1.0, 1.0])
    found = adv.krpo(
        rewards,
        groups,
        initial_mean=0.5,
        initial_variance=2.0,
        process_noise=1.0,
        measurement_noise=1.0,
    )
    same(found[:1], 0.125 / 0.75**0.5)


def test_signed_by_hand() -> None:
    correct = flags(1, 0, 1)
    same(adv.signed(correct, torch.float64, positive=0.1, negative=1.0), 0.1, -1, 0.1)
    same(adv.signed(correct, torch.float64, positive=0.0, negative=1.0), 0, -1, 0)


def test_lead_by_hand() -> None:
    """Correct lengths 10 and 20: z = -/+ 0.707107, rewards 1.035988 and 0.965262. w(2/3) =
    1.166765, w(1/3) = 1.483206.

    A single correct response has reward 1. A group all right keeps the length part: w(1) =
    0.483444, w(0) = 1.499392.
    """
    correct = flags(1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0)
    lengths = torch.tensor([10, 20, 100, 50, 1, 2, 9999, 10, 20, 5, 6])
    groups = segments_of(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]))
    accuracy = groups.mean(correct.double())
    found = adv.lead(correct, lengths, accuracy, groups, eps=0.0, ddof=0)
    expected = [0.868370, 0.780911, -2.096587, 2.585325, *[-0.548483] * 3]
    same(found, *expected, 0.483444, -1.499392, 0, 0, tolerance=2e-5)


def test_lead_eps_and_divisor() -> None:
    correct = flags(1, 0)
    lengths = torch.tensor([5, 5])
    groups = segments_of(torch.zeros(2, dtype=torch.int64))
    found = adv.lead(
        correct, lengths, vector(0.5), groups, eps=1.0, ddof=0, weight_range=0.0, weight_floor=1.0
    )
    same(found, 0.5, -0.5)  # rewards +1 and -1, std 1, eps 1


def test_pass_at_k_by_hand() -> None:
    """N = 4, one right, k = 2: R = 1 - 3/6; A- = (0.5 - 2/3) / 0.5. N = 8, one right, k = 4: R = 1
    - 35/70."""
    one_of_4 = flags(1, 0, 0, 0)
    one_of_8 = flags(1, *[0] * 7)
    seven_of_8 = flags(*[1] * 7, 0)
    groups = segments_of(torch.zeros(4, dtype=torch.int64))
    same(adv.pass_at_k(one_of_4, torch.float64, groups, k=2), 1, *[-1 / 3] * 3)
    groups = segments_of(torch.zeros(8, dtype=torch.int64))
    same(adv.pass_at_k(one_of_8, torch.float64, groups, k=4), 1, *[-1 / 7] * 7)
    same(adv.pass_at_k(seven_of_8, torch.float64, groups, k=2), *[0] * 8)
    same(adv.pass_at_k(seven_of_8, torch.float64, groups, k=1), *[1 / ROOT7] * 7, -ROOT7)
    same(adv.pass_at_k(flags(*[0] * 8), torch.float64, groups, k=2), *[0] * 8)


def test_pass_at_k_three_of_five() -> None:
    """N- = 2, k = 2: R = 1 - 1/10 = 0.9, s = 0.3; A+ = 1/3, A- = (0.1 - 1/4) / 0.3 = -1/2."""
    groups = segments_of(torch.zeros(5, dtype=torch.int64))
    same(adv.pass_at_k(flags(1, 1, 1, 0, 0), torch.float64, groups, k=2), *[1 / 3] * 3, -0.5, -0.5)


def test_quarters_by_hand() -> None:
    """Quartiles of 1..4 are 1.75 and 3.25; a value on the first quartile is low, one on both
    too."""
    assert adv.quarters(vector(1, 2, 3, 4)).tolist() == [0, 1, 1, 2]
    assert adv.quarters(vector(5, 1, 2, 3, 4)).tolist() == [2, 0, 0, 1, 2]
    assert adv.quarters(vector(1, 1, 1)).tolist() == [0, 0, 0]


def test_quantile_bins_by_hand() -> None:
    """A value on an inner edge belongs to the upper bin; the maximum to the last one."""
    assert adv.quantile_bins(vector(1, 2, 3, 4), 4).tolist() == [0, 1, 2, 3]
    assert adv.quantile_bins(vector(3, 1, 2), 2).tolist() == [1, 0, 1]
    assert adv.quantile_bins(vector(3, 1, 2), 1).tolist() == [0, 0, 0]


def durian(bins: int, **changes: float) -> torch.Tensor:
    """Prompts [1, 0], [1, 1], [1, 0] with entropies 1, 1, 5 and confidences -1, -3, -2."""
    rewards, groups = ragged([1.0, 0.0], [1.0, 1.0], [1.0, 0.0])
    confidence = vector(-0.5, -1.5, -3, -3, -2, -2)
    entropy = vector(1, 1, 1, 1, 5, 5)
    knobs = {"group": 0.5, "perceptual": 0.3, "reasoning": 0.2, "eps": 0.0} | changes
    eps = knobs.pop("eps")
    given = evidence(rewards, groups, eps=eps, mean_logprobs=confidence, visual_entropy=entropy)
    return adv.durian(given, reasoning_bins=bins, **knobs)


def test_durian_by_hand() -> None:
    """Entropy buckets {1, 0, 1, 1}: sample std 1/2, own mean 1/2 -> 1; {1, 0} -> 0.707107. One
    confidence bucket of {1, 0, 1, 1, 1, 0}: sample std 0.516398 -> 0.968246. Two: {1, 0, 1, 0} ->
    0.866025 and {1, 1} -> 0.
    """
    same(durian(1), 0.993649, -0.993649, 0, 0, 0.905781, -0.905781)
    same(durian(2), 0.973205, -0.973205, 0, 0, 0.885337, -0.885337)
    same(durian(2, reasoning=0.0, group=0.0), 0.3, -0.3, 0, 0, 0.212132, -0.212132)


def test_durian_eps_is_added_to_bucket_stds() -> None:
    same(durian(1, eps=0.5, reasoning=0.0, group=0.0)[:2], 0.15, -0.15)


def test_durian_bucket_of_one_reward_gives_zero() -> None:
    groups = segments_of(torch.tensor([0, 0, 1]))
    given = evidence(vector(1, 0, 1), groups, mean_logprobs=vector(-1, -1, -2))
    found = adv.durian(given, group=0.0, perceptual=0.0, reasoning=1.0, reasoning_bins=2)
    same(found, 0.707107, -0.707107, 0)


def test_durian_confidence_is_the_mean_or_the_sum() -> None:
    """Means are alike: one bucket {1, 0, 1, 1} of std 1/2. Sums differ: {1, 0} of std 0.707107."""
    rewards, groups = ragged([1.0, 0.0], [1.0, 1.0])
    logprobs = {"mean_logprobs": vector(-1, -1, -1, -1), "sum_logprobs": vector(-1, -1, -9, -9)}
    given = evidence(rewards, groups, **logprobs)
    knobs = {"group": 0.0, "perceptual": 0.0, "reasoning": 1.0, "reasoning_bins": 2}
    same(adv.durian(given, **knobs), 1, -1, 0, 0)
    same(adv.durian(given, normalize=False, **knobs), 0.707107, -0.707107, 0, 0)


def test_float32_in_float32_out() -> None:
    rewards, groups = ragged(MIXED)
    assert adv.zscore(rewards.float(), groups, eps=1e-6, ddof=0).dtype == torch.float32
    assert adv.rloo(rewards, groups).dtype == torch.float64
