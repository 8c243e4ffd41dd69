"""The composition of estimator, shapers, KL placement and filters, by hand; and every error of the
domain."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_rl.loss import ResponseBatch
from megatron_rl.loss.config import MethodConfig
from megatron_rl.loss.per_response.credit import credit
from tests.unit.loss.groups import flags, plain, same, vector

DURIAN = {"name": "durian"}


def plan(**changes: Any) -> MethodConfig:
    """Centered rewards, but for ``changes`` of the yaml."""
    return plain(**{"estimator": {"name": "centered"}, "eps": 0.0} | changes)


PLAN = plan()


def batch(**changes: Any) -> ResponseBatch:
    """Two prompts of two responses: one right and one wrong, then both right. Rewards hold a format
    part of 0.5."""
    known = ResponseBatch.__dataclass_fields__
    fields = {name: value for name, value in changes.items() if name in known}
    return ResponseBatch(
        **{
            "rewards": vector(1.5, 0.5, 1.5, 1),
            "correct": flags(1, 0, 1, 1),
            "group_ids": torch.tensor([0, 0, 1, 1]),
            "response_tokens": torch.tensor([2, 8, 4, 6]),
        }
        | fields
        | {"columns": {name: value for name, value in changes.items() if name not in fields}}
    )


def test_accuracy_comes_from_correct_not_from_the_reward() -> None:
    """focal with p = 1/2 and 1: sqrt(1/2) and 0."""
    found = credit(batch(), plan(shaping={"focal": {"gamma": 0.5}}))
    same(found.advantages, 0.353553, -0.353553, 0, 0)


def test_of_the_given_responses_of_a_group_one_is_estimated() -> None:
    """The second is the surest; without the first the group's mean is 1/2, not 2/3, and the mean of
    all rewards 1/2, not 3/5. The leaving one keeps its reward."""
    data = batch(
        rewards=vector(1, 1, 0, 1, 0),
        correct=flags(1, 1, 0, 1, 0),
        group_ids=torch.tensor([0, 0, 0, 1, 1]),
        response_tokens=torch.tensor([2, 3, 4, 5, 6]),
        is_demonstration=flags(1, 1, 0, 0, 0),
        mean_entropy=vector(2, 1, 0, 0, 0),
        progress=torch.tensor(0.5),
    )
    found = credit(data, plan(filters={"demonstrations": {}}))
    same(found.advantages, 0, 0.5, -0.5, 0.5, -0.5)
    same(found.kl_weights, 0, 1, 1, 1, 1)
    assert found.keep.tolist() == [False, True, True, True, True]
    same(found.metrics["credit/omega"][None], 0.5)
    assert found.rewards is not None
    same(found.rewards, 1, 1, 0, 1, 0)
    none = {**data.columns, "is_demonstration": flags(*[0] * 5)}
    sampled = dataclasses.replace(data, columns=none)
    same(credit(sampled, plan(filters={"demonstrations": {}})).advantages[:3], *THIRDS)


THIRDS = (1 / 3, 1 / 3, -2 / 3)


def test_omega_is_the_mean_reward_of_the_batch() -> None:
    """0.5625 over alpha 0.75: positive advantages times 0.75. Outside [0, 1] it stops there."""
    data = batch(rewards=vector(1, 0.5, 0.5, 0.25))
    found = credit(data, plan(shaping={"ass": {"alpha": 0.75}}))
    same(found.advantages, 0.1875, -0.25, 0.09375, -0.125)
    same(found.metrics["credit/omega"][None], 0.5625)
    same(credit(batch(), PLAN).metrics["credit/omega"][None], 1)
    lower = credit(batch(rewards=vector(0.5, -0.5, -1, -2)), PLAN)
    same(lower.metrics["credit/omega"][None], 0)


def test_shapers_by_omega_take_rewards_in_the_unit_interval() -> None:
    """Of -1 and 1 omega would be 0 until half of all responses are right, and with it every
    positive advantage."""
    data = batch(rewards=vector(-1, 1, -1, 1))
    for name in ("ddas", "ass"):
        with pytest.raises(
            ValueError, match=rf"shaper {name} needs .* got \[-1, 1\]; .*- -1\) / 2"
        ):
            credit(data, plan(shaping={name: {}}))
    credit(data, plan(shaping={"focal": {}}))


CURIOSITY = {"curiosity": {"kappa": 2.0, "alpha": 1.0, "start": 1.0, "end": 0.0}}


IN_REWARD = {"coef": 0.1, "placement": "reward"}


def test_curiosity_in_the_reward() -> None:
    """w = 0.75, |r| / 2 = 0.75, 0.25, 0.75, 0.5, B = 0.5, 0.5, 2, 0.1: bonuses 0.375, 0.1875,
    0.5625 and 0.075, on top of the KL of 0.1, which they are not made of. omega is that of the
    plain rewards, 1.125 clipped to 1."""
    data = batch(mean_logprobs=vector(-0.5, -0.5, -2, -0.1), progress=torch.tensor(0.25))
    found = credit(data, plan(reward_shaping=CURIOSITY))
    same(found.advantages, 0.59375, -0.59375, 0.49375, -0.49375)
    same(found.metrics["credit/curiosity_bonus_mean"][None], 0.3)
    same(found.metrics["credit/omega"][None], 1)
    priced = dataclasses.replace(data, columns={**data.columns, "kl": vector(0, 0, 1, 0)})
    both = plan(reward_shaping=CURIOSITY, kl=IN_REWARD)
    same(credit(priced, both).advantages, 0.59375, -0.59375, 0.44375, -0.44375)


def test_kl_in_the_reward() -> None:
    """r - coef weight kl, weights f(1/2) = 0.743118 for the correct response of the first group,
    else 1.

    omega stays that of the plain rewards: (0.4 + 0 + 0.4 + 0) / 4 = 0.2."""
    data = batch(rewards=vector(0.4, 0, 0.4, 0), kl=vector(1, 2, 3, 4))
    found = credit(data, plan(kl={**IN_REWARD, "weights": {"name": "dads"}}))
    same(found.advantages, 0.262844, -0.262844, 0.25, -0.25)
    same(found.kl_weights, 0.743118, 1, 1, 1)
    same(found.metrics["credit/omega"][None], 0.2)
    signs = {"coef": 0.0, "coef_positive": 0.2, "coef_negative": 0.1}
    by_sign = credit(data, plan(kl={**signs, "placement": "reward"}))
    same(by_sign.advantages, 0.2, -0.2, 0.3, -0.3)


MIXED = {"name": "mixed", "success": "reward_is_one"}


def test_kl_in_the_reward_does_not_move_the_success_count() -> None:
    """Rewards are 1, 0.5, 0, 0 before the KL: p = 1/4, l = 1/4, although no reward is 1 after
    it."""
    data = batch(
        rewards=vector(1, 0.5, 0, 0),
        group_ids=torch.zeros(4, dtype=torch.int64),
        kl=vector(1, 1, 1, 1),
    )
    # Together they are refused of a yaml: the rewards leave [0, 1].
    chosen = plan().model_copy(
        update={"estimator": plan(estimator=MIXED).estimator, "kl": plan(kl=IN_REWARD).kl}
    )
    found = credit(data, chosen)
    mean, std = 0.275, (0.171875) ** 0.5  # rewards minus 0.1; the variance is that of 1, 0.5, 0, 0
    same(found.advantages[:1], 0.75 * (0.9 - mean) / std + 0.25 * (0.9 - mean) / mean)


def test_mixed_counts_success_by_correctness_on_request() -> None:
    """Rewards 0.9 and 0 never reach 1: by reward l = 1 and apd remains, by correctness p = 1/2 and
    zscore remains."""
    data = batch(rewards=vector(0.9, 0, 0, 0), correct=flags(1, 0, 0, 0))
    by_reward = credit(data, plan(estimator=MIXED))
    same(by_reward.advantages, 1, -1, 0, 0)
    data = batch(rewards=vector(0.9, 0.3, 0, 0), correct=flags(1, 0, 0, 0))
    by_correct = credit(data, plan(estimator=MIXED | {"success": "correct"}))
    same(by_correct.advantages, 1, -1, 0, 0)
    by_reward = credit(data, plan(estimator=MIXED))
    same(by_reward.advantages, 0.5, -0.5, 0, 0)


def test_stcr_window() -> None:
    """Mean correct length of the group 2, of the batch 4; the wrong response has 8 tokens. mu =
    2."""
    for window, alpha in (("group", 2 - 2.0**-6), ("batch", 2 - 2.0**-4)):
        shaper = {"stcr": {"mu": 2.0, "window": window}}
        same(credit(batch(), plan(shaping=shaper)).advantages, 0.5, -0.5 * alpha, 0.25, -0.25)


def test_durian_confidence_mean_or_sum() -> None:
    """Sums rank the prompts the other way round than means; the buckets follow."""
    data = batch(
        group_ids=torch.tensor([0, 0, 1, 1]),
        rewards=vector(1, 0, 1, 1),
        mean_logprobs=vector(-1, -1, -1, -1),
        sum_logprobs=vector(-1, -1, -9, -9),
    )
    knobs = DURIAN | {"group": 0.0, "perceptual": 0.0, "reasoning": 1.0, "reasoning_bins": 2}
    same(credit(data, plan(estimator=knobs)).advantages, 1, -1, 0, 0)  # one bucket of four, std 1/2
    apart = credit(data, plan(estimator=knobs | {"normalize": False}))
    same(apart.advantages, 0.707107, -0.707107, 0, 0)


def test_drop_all_correct_keeps_the_statistics() -> None:
    found = credit(batch(), plan(filters={"drop_all_correct": True}))
    assert found.keep.tolist() == [True, True, False, False]
    same(found.advantages, 0.5, -0.5, 0.25, -0.25)
    same(found.metrics["credit/omega"][None], 1)
    assert credit(batch(), PLAN).keep.all()


def test_metrics_by_hand() -> None:
    data = batch(rewards=vector(1, 0, 1, 1))
    metrics = {
        key: value.item()
        for key, value in credit(
            data, plan(kl={"coef": 0.0, "weights": {"name": "dads", "curve": "linear"}})
        ).metrics.items()
    }
    assert metrics == pytest.approx(
        {
            "credit/zero_spread_group_share": 0.5,
            "credit/extreme_group_share": 0.5,  # the first group: one of two
            "credit/extreme_advantage_abs_mean": 0.5,
            "credit/extreme_zscore_abs_mean": 1.0,
            "credit/all_correct_group_share": 0.5,
            "credit/none_correct_group_share": 0.0,
            "credit/advantage_positive_sum": 0.5,
            "credit/advantage_negative_sum": 0.5,
            "credit/omega": 0.75,
            "credit/accuracy_mean": 0.75,
            "credit/length_gap_tokens": 8 - 4,
            "credit/kl_weight_mean": 3.5 / 4,
            "credit/kept_response_share": 1.0,
        }
    )
    thirds = batch(
        rewards=vector(0, 1, 1, 0, 0, 0),
        correct=flags(0, 1, 1, 0, 0, 0),
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1]),
        response_tokens=torch.ones(6, dtype=torch.int64),
    )
    found = credit(
        dataclasses.replace(thirds, group_ids=torch.tensor([0, 0, 1, 1, 2, 2])), PLAN
    ).metrics
    assert found["credit/zero_spread_group_share"].item() == pytest.approx(1 / 3)
    assert found["credit/none_correct_group_share"].item() == pytest.approx(1 / 3)
    no_extreme = credit(thirds, PLAN).metrics
    assert no_extreme["credit/extreme_group_share"].item() == 0
    assert no_extreme["credit/extreme_advantage_abs_mean"].item() == 0
    everything_right = credit(batch(correct=flags(1, 1, 1, 1)), PLAN).metrics
    assert everything_right["credit/length_gap_tokens"].item() == 0


def test_extreme_groups_by_hand() -> None:
    """One right of four: z = sqrt(3) once and -1/sqrt(3) three times, r - mean 3/4 and -1/4. The
    group of two right ones of four is left out."""
    data = batch(
        rewards=vector(1, 0, 0, 0, 1, 1, 0, 0),
        correct=flags(1, 0, 0, 0, 1, 1, 0, 0),
        group_ids=torch.tensor([0] * 4 + [1] * 4),
        response_tokens=torch.ones(8, dtype=torch.int64),
    )
    found = credit(data, PLAN).metrics
    assert found["credit/extreme_advantage_abs_mean"].item() == pytest.approx(3 / 8)
    assert found["credit/extreme_zscore_abs_mean"].item() == pytest.approx(3**0.5 / 2)


def test_groups_of_one_are_refused_by_group_relative_methods() -> None:
    data = batch(group_ids=torch.tensor([0, 0, 0, 7]))
    with pytest.raises(
        ValueError,
        match=r"centered .* needs at least 2, but a group has 1; raise batch.responses_per_prompt",
    ):
        credit(data, PLAN)
    signed = {"name": "signed", "positive": 1.0, "negative": 1.0}
    same(credit(data, plan(estimator=signed)).advantages, 1, -1, 1, 1)


def test_rewards_outside_the_unit_interval_are_refused() -> None:
    for name in ("tree", "apd", "mixed"):
        with pytest.raises(
            ValueError,
            match=rf"{name} needs rewards in \[0, 1\] and got \[0.5, 1.5\]; .*/ 1\.5.* sum to 1",
        ):
            credit(batch(), plan(estimator={"name": name}))
        with pytest.raises(ValueError, match=r"got \[-1, 1\]; rescale them by \(r - -1\) / 2"):
            credit(batch(rewards=vector(-1, 1, 1, 1)), plan(estimator={"name": name}))


def test_k_above_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pass_at_k .* needs at least 4, but a group has 2"):
        credit(batch(), plan(estimator={"name": "pass_at_k", "k": 4}))


def test_missing_fields_are_named() -> None:
    for changes, lacking in (
        ({"estimator": DURIAN}, "visual_entropy"),
        ({"estimator": DURIAN | {"perceptual": 0.0, "normalize": False}}, "sum_logprobs"),
        ({"kl": IN_REWARD}, "kl"),
        ({"reward_shaping": CURIOSITY}, "mean_logprobs"),
    ):
        with pytest.raises(ValueError, match=f"ResponseBatch has no {lacking}, .*give it, or"):
            credit(batch(), plan(**changes))


def test_bad_rewards_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] = nan"):
        credit(batch(rewards=vector(1, float("nan"), 1, 1)), PLAN)
    empty = ResponseBatch(
        vector(), flags(), torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)
    )
    with pytest.raises(ValueError, match="no responses"):
        credit(empty, PLAN)
