"""Loading: what a method's configuration accepts, refuses, and asks of the trainer."""

import pytest
import torch

from megatron_rl.config.load import validate
from megatron_rl.config.method import load_method
from megatron_rl.errors import ConfigError
from megatron_rl.loss.config import MethodConfig, reward_scheme_errors
from tests.unit.loss.batches import response_batch, rollout, token_batch
from tests.unit.loss.groups import flags, same, vector


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_method(name, overrides)
    return str(error.value)


def test_overrides_are_relative_to_the_method() -> None:
    method = load_method(
        "a_grae", ["kl.coef=0.001", "shaping.ass.alpha=0.5", "policy_loss.high=0.28"]
    )
    assert method.config.kl.coef == 0.001
    assert method.config.shaping["ass"].model_dump() == {"name": "ass", "alpha": 0.5}
    assert method.config.policy_loss.model_dump() == {
        "name": "ppo_clip",
        "low": 0.2,
        "high": 0.28,
        "dual_c": None,
    }


def test_a_configuration_that_was_written_out_is_read_again() -> None:
    """As a run's config.json, or that of a bundle, has it."""
    for name in ("a_grae", "rl_zvp", "siren", "archer"):
        written = load_method(name).config
        again = validate(MethodConfig, written.model_dump(mode="json"), "config.json")
        assert again == written


def test_switching_a_piece_takes_its_own_defaults() -> None:
    gspo = load_method("grpo", ["policy_loss.name=gspo"]).config.policy_loss
    assert gspo.knobs["high"] == 4e-4
    dads = load_method("grpo", ["kl.weights.name=dads"]).config.kl.weights
    assert dads.knobs["curve"] == "exponential"


def test_a_knob_of_another_piece_is_refused_by_name() -> None:
    message = refused("durian", "estimator.name=krpo")
    assert (
        "estimator.reasoning_bins = 12: is a knob of durian, but the estimator is krpo" in message
    )
    assert "its knobs are initial_mean" in message
    assert (
        "shaping.ass.mu = 2: is a knob of stcr, but the shaper is ass (its knobs are alpha)"
        in refused("a_grae", "shaping.ass.mu=2")
    )
    found = refused("cispo", "policy_loss.dual_c=3")
    assert "policy_loss.dual_c = 3: is a knob of ppo_clip and adaptive_clip and exgrpo" in found


def test_every_problem_is_reported_at_once() -> None:
    message = refused(
        "grpo",
        "kl.cof=1",
        "estimator.name=zscor",
        "shaping.fokal={}",
        "eps=-1",
        "policy_loss.lo=0.1",
    )
    assert message.startswith("5 problems in method grpo")
    for part in (
        "kl.cof: unknown key; did you mean kl.coef",
        "estimator.name = 'zscor': is not one of the estimators zscore, centered",
        "shaping.fokal = {}: is not one of the shapers stcr",
        "eps = -1",
        (
            "policy_loss.lo = 0.1: is no knob of policy loss ppo_clip (its knobs are low, high,"
            " dual_c)"
        ),
    ):
        assert part in message


def test_unknown_methods_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="gpro"):
        load_method("gpro")


def test_wrong_values_are_refused() -> None:
    assert "shaping.ass.alpha = 0" in refused("a_grae", "shaping.ass.alpha=0")
    assert "shaping.ass = 3: must be a mapping of knobs" in refused("a_grae", "shaping.ass=3")
    assert "give both or none" in refused("grpo", "kl.coef_positive=0.1")
    assert "set coef to 0" in refused("grpo", "kl.coef_positive=0.1", "kl.coef_negative=0.2")
    assert "all 0" in refused(
        "durian", "estimator.group=0", "estimator.perceptual=0", "estimator.reasoning=0"
    )


def test_a_ratio_to_the_sampler_is_not_counted_twice() -> None:
    for name in ("dppo", "dppo_kl", "ipo"):
        for kind in ("tis", "icepop"):
            assert "would count twice" in refused(name, f"mismatch.kind={kind}")
        assert load_method(name, ["mismatch.kind=sequence_mask"]).config.weighs_sampler
    assert not load_method("grpo", ["mismatch.kind=sequence_mask"]).config.weighs_sampler


def test_unit_reward_methods_refuse_what_leaves_the_unit_interval() -> None:
    for name in ("mapo", "mapo_apd", "tree_rpo"):
        assert "kl.placement=loss" in refused(name, "kl.placement=reward")
        assert "reward_shaping={}" in refused(name, "reward_shaping.overlong={}")
    for name in ("a_grae", "a_grae_ddas", "a_grae_ass", "a_grae_dapo", "a_grae_dr_grpo"):
        assert "needs rewards in [0, 1]" in refused(name, "reward_shaping.overlong={}")
        # omega is of the rewards before the KL.
        load_method(name, ["kl.placement=reward", "kl.coef=0.1"])


def test_reward_schemes() -> None:
    mapo, apd, grpo = (load_method(name).config for name in ("mapo", "mapo_apd", "grpo"))
    assert (
        reward_scheme_errors(grpo, 1.0, 0.5)
        == reward_scheme_errors(mapo, 0.9, 0.1)
        == reward_scheme_errors(apd, 0.5, 0.1)
        == []
    )
    assert "they reach 1.5; divide both weights" in reward_scheme_errors(apd, 1.0, 0.5)[0]
    assert "method.estimator.name = apd: needs" in reward_scheme_errors(apd, 1.0, 0.5)[0]
    for name, key in (("a_grae", "ddas"), ("a_grae_ass", "ass")):
        method = load_method(name).config
        assert reward_scheme_errors(method, 0.1, 0.9) == []
        assert f"method.shaping.{key}: needs" in reward_scheme_errors(method, 1.0, 0.5)[0]
        assert "needs rewards in [0, 1]" in reward_scheme_errors(method, 2.0, -1.0)[0]
    assert "no response can reach a reward of exactly 1" in reward_scheme_errors(mapo, 0.5, 0.1)[0]
    assert (
        reward_scheme_errors(load_method("mapo", ["estimator.success=correct"]).config, 0.5, 0.1)
        == []
    )


def test_dr_grpo_needs_a_length_only_when_the_loss_is_computed() -> None:
    rows = rollout(0)
    without = load_method("dr_grpo")
    credit = without.credit(response_batch(rows))
    with pytest.raises(ValueError, match=r"aggregate\.norm_len is null.*response_limit"):
        without.loss(token_batch(rows, credit))
    by_limit = load_method("dr_grpo", response_limit=50)
    by_knob = load_method("dr_grpo", ["aggregate.norm_len=50"], response_limit=7)
    assert (
        by_limit.loss(token_batch(rows, credit)).loss.item()
        == by_knob.loss(token_batch(rows, credit)).loss.item()
        != 0
    )


def test_needs_of_the_trainer() -> None:
    names = ("grpo", "dapo", "durian", "w_reinforce", "pass_at_k", "krpo")
    methods = {name: load_method(name) for name in names}
    assert [name for name in names if methods[name].reads_reference] == ["grpo", "durian"]
    assert [methods[name].config.min_group for name in names] == [2, 2, 2, 1, 4, 1]
    assert [methods[name].max_sampling_tries for name in names] == [1, 10, 1, 1, 1, 1]
    asked = load_method(
        "grpo",
        [
            "entropy.coef=0.01",
            "kl={coef: 0, coef_positive: 0.1, coef_negative: 0.2}",
            "reward_shaping.repetition={}",
        ],
    )
    assert asked.reads_reference and asked.reads_token_ids
    assert not methods["dapo"].reads_token_ids


def test_what_methods_read_is_known_with_its_readers() -> None:
    read = {name: load_method(name).reads for name in ("grpo", "durian", "durian_reasoning")}
    assert {name: [*reads] for name, reads in read.items()} == {
        "grpo": [],
        "durian": ["visual_entropy", "mean_logprobs"],
        "durian_reasoning": ["mean_logprobs"],
    }
    (reading,) = read["durian"]["visual_entropy"]
    assert reading.reader == "estimator durian with perceptual > 0"
    assert "kl" in load_method("grpo", ["kl.placement=reward"]).reads
    both = load_method("archer", ["entropy.coef=0.01"]).reads["entropy"]
    assert [each.reader for each in both] == [
        "aggregation token_mean_by_entropy",
        "policy loss entropy_clip",
        "entropy.coef",
    ]


def test_token_shaping_is_strict() -> None:
    assert "token_shaping.zero_varians = {}: is not one of the token shapers zero_variance" in (
        refused("rl_zvp", "token_shaping.zero_varians={}")
    )
    assert "token_shaping.entropy_bonus.kappa = 0" in refused(
        "entropy_advantage", "token_shaping.entropy_bonus.kappa=0"
    )
    assert "is a knob of entropy_bonus, but the token shaper is zero_variance" in refused(
        "rl_zvp", "token_shaping.zero_variance.kappa=1"
    )
    assert "policy_loss.quantile = 1.5" in refused("archer", "policy_loss.quantile=1.5")
    assert "is a knob of entropy_clip, but the policy loss is ppo_clip" in refused(
        "grpo", "policy_loss.reasoning_low=0.5"
    )


def test_shape_rewards_by_hand() -> None:
    """Limit 10, buffer 2 of it: -1/2 at 9 tokens. Repetition -0.1 for the truncated "1 1"."""
    overrides = ["reward_shaping.overlong={}", "reward_shaping.repetition={}"]
    method = load_method("grpo", overrides, response_limit=10)
    lengths = torch.tensor([9, 2, 2])
    truncated = flags(0, 1, 0)
    tokens = torch.tensor([*range(9), 1, 1, 1, 1])
    same(method.shape_rewards(vector(1, 1, 1), lengths, truncated, tokens), 0.5, 0.9, 1)
    fixed = load_method(
        "grpo", ["reward_shaping.overlong={max_tokens: 20, factor: 3}"], response_limit=10
    )
    same(fixed.shape_rewards(vector(1, 1), torch.tensor([18, 20]), flags(0, 0)), -0.5, -2)
    plain = load_method("grpo")
    same(plain.shape_rewards(vector(1, 1, 1), lengths, truncated), 1, 1, 1)
    with pytest.raises(ValueError, match=r"overlong\.max_tokens is null"):
        load_method("dapo").shape_rewards(vector(1), torch.tensor([1]), flags(0))
    with pytest.raises(ValueError, match="needs token_ids"):
        method.shape_rewards(vector(1, 1, 1), lengths, truncated)


def test_dynamic_sampling_keeps_groups_with_both_outcomes() -> None:
    groups = [(True, False), (True, True), (False, False)]
    assert [*map(load_method("dapo").wants_group, groups)] == [True, False, False]
    assert all(map(load_method("grpo").wants_group, groups))
    of_four = load_method("dapo", ["estimator={name: pass_at_k, k: 4}"]).wants_group
    assert of_four((True, False, True, False)) and not of_four((True, False, True))


def test_kl_in_the_reward_leaves_the_loss() -> None:
    rows = rollout(0)
    method = load_method("grpo", ["kl.placement=reward", "kl.coef=0.5"])
    credit = method.credit(response_batch(rows))
    plain = load_method("grpo").credit(response_batch(rows))
    assert not torch.equal(credit.advantages, plain.advantages)
    assert method.loss(token_batch(rows, credit)).metrics["loss/kl"].item() == 0
