"""What must hold for any rollout, as properties. Binary rewards, std_ddof 0 and eps 0 unless a
property says otherwise."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.per_response import advantages as adv
from megatron_rl.loss.per_response import filters, shaping
from megatron_rl.loss.per_token import aggregate, kl
from megatron_rl.loss.per_token import policy_losses as losses
from megatron_rl.loss.segments import Segments, segments_of
from tests.unit.loss.groups import evidence, flags, terms


def holds(*strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The property is tried on 40 examples."""
    return lambda prove: settings(max_examples=40)(given(*strategies)(prove))


OUTCOMES = st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=6)
MIXED_GROUP = st.lists(st.booleans(), min_size=2, max_size=12).filter(
    lambda group: any(group) and not all(group)
)
OMEGA = st.floats(0, 1)
LENGTHS = st.integers(1, 4000)


def binary(outcomes: list[list[bool]]) -> tuple[Tensor, Tensor, Segments]:
    """(rewards, correct, groups)."""
    correct = torch.tensor([right for group in outcomes for right in group])
    ids = torch.tensor([which for which, group in enumerate(outcomes) for _ in group])
    return correct.double(), correct, segments_of(ids)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def zscore(rewards: Tensor, groups: Segments) -> Tensor:
    return adv.zscore(rewards, groups, eps=0.0, ddof=0)


@holds(OUTCOMES)
def test_zscore_sums(outcomes: list[list[bool]]) -> None:
    """sum A = 0 and sum |A+| = sum |A-| = G sqrt(p (1 - p))."""
    rewards, _, groups = binary(outcomes)
    found = zscore(rewards, groups)
    p = groups.mean(rewards)
    expected = groups.count * (p * (1 - p)).sqrt()
    close(groups.sum(found), torch.zeros_like(p))
    close(groups.sum(found.clamp(min=0)), expected)
    close(groups.sum(-found.clamp(max=0)), expected)


@holds(OUTCOMES)
def test_centered_sums(outcomes: list[list[bool]]) -> None:
    rewards, _, groups = binary(outcomes)
    p = groups.mean(rewards)
    close(groups.sum(adv.centered(rewards, groups).abs()), 2 * groups.count * p * (1 - p))


@holds(OUTCOMES)
def test_rloo_is_scaled_centered(outcomes: list[list[bool]]) -> None:
    rewards, _, groups = binary(outcomes)
    close(
        adv.rloo(rewards, groups),
        adv.centered(rewards, groups)
        * groups.broadcast(groups.count.double() / (groups.count - 1)),
    )


@holds(OUTCOMES)
def test_hard_and_easy_sums(outcomes: list[list[bool]]) -> None:
    """sum |A| = G sqrt(1 - p) and G sqrt(p), for p strictly inside (0, 1); 0 outside."""
    rewards, _, groups = binary(outcomes)
    found = zscore(rewards, groups)
    p = groups.mean(rewards)
    inside = (p > 0) & (p < 1)
    share = groups.broadcast(p)
    close(
        groups.sum(shaping.hard_focused(found, share).abs()), inside * groups.count * (1 - p).sqrt()
    )
    close(groups.sum(shaping.easy_focused(found, share).abs()), inside * groups.count * p.sqrt())


@holds(OUTCOMES, OMEGA)
def test_ddas_sums(outcomes: list[list[bool]], omega: float) -> None:
    """sum |A| = omega G sqrt(1 - p) + (1 - omega) G sqrt(p) and sum A = 0."""
    rewards, _, groups = binary(outcomes)
    p = groups.mean(rewards)
    found = shaping.ddas(
        zscore(rewards, groups), groups.broadcast(p), torch.tensor(omega, dtype=torch.float64)
    )
    inside = (p > 0) & (p < 1)
    close(
        groups.sum(found.abs()),
        inside * groups.count * (omega * (1 - p).sqrt() + (1 - omega) * p.sqrt()),
    )
    close(groups.sum(found), torch.zeros_like(p))


@holds(OUTCOMES, OMEGA, st.floats(0.05, 1))
def test_ass_is_the_identity_once_omega_reaches_alpha(
    outcomes: list[list[bool]], omega: float, alpha: float
) -> None:
    rewards, _, groups = binary(outcomes)
    before = zscore(rewards, groups)
    found = shaping.ass(before, torch.tensor(omega, dtype=torch.float64), alpha=alpha)
    close(found.clamp(max=0), before.clamp(max=0))
    close(found.clamp(min=0), before.clamp(min=0) * min(1.0, omega / alpha))
    if omega >= alpha:
        assert torch.equal(found, before)


@holds(MIXED_GROUP)
def test_mapo_is_a_multiple_of_zscore(group: list[bool]) -> None:
    """rho(p) = (1 - l) + l sqrt((1 - p) / p); 1 at p = 1/2."""
    rewards, _, groups = binary([group])
    p = groups.mean(rewards)
    certainty = 1 - 4 * p * (1 - p)
    rho = (1 - certainty) + certainty * ((1 - p) / p).sqrt()
    found = adv.mixed(rewards, rewards, rewards == 1, groups, eps=0.0, ddof=0)
    close(found, rho * zscore(rewards, groups))
    if p.item() == 0.5:
        assert rho.item() == 1


def test_mapo_factor_decreases() -> None:
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    certainty = 1 - 4 * p * (1 - p)
    assert (((1 - certainty) + certainty * ((1 - p) / p).sqrt()).diff() < 0).all()


@holds(MIXED_GROUP, st.data())
def test_stcr_factor_stays_in_its_range(group: list[bool], data: st.DataObject) -> None:
    """alpha in [1, 2], exactly 1 for correct responses; 2 only by rounding of mu^-L."""
    _, correct, groups = binary([group])
    lengths = torch.tensor([data.draw(LENGTHS) for _ in group])
    alpha = shaping.stcr(torch.ones(len(group), dtype=torch.float64), correct, lengths, groups)
    assert (alpha >= 1).all() and (alpha < 2).all() and (alpha[correct] == 1).all()


@holds(st.sampled_from(["exponential", "linear", "cubic"]))
def test_dads_curves_decrease(curve: str) -> None:
    values = kl.CURVES[curve](torch.linspace(0, 1, 101, dtype=torch.float64))
    assert (values.diff() < 0).all() and abs(values[-1].item()) < 1e-12


@holds(OUTCOMES, st.data())
def test_durian_reductions(outcomes: list[list[bool]], data: st.DataObject) -> None:
    """(1, 0, 0) is zscore; one prompt is the sample-std zscore; zero sum inside a prompt."""
    rewards, _, groups = binary(outcomes)
    draws = torch.tensor(
        [data.draw(st.floats(-5, 0)) for _ in range(groups.num)], dtype=torch.float64
    )
    confidence = groups.broadcast(draws)

    def durian(which: Segments, values: Tensor, *weights: float) -> Tensor:
        knobs = dict(zip(("group", "perceptual", "reasoning"), weights, strict=True))
        some = confidence[: which.index.numel()]
        read = evidence(values, which, mean_logprobs=some, visual_entropy=some)
        return adv.durian(read, **knobs)

    close(durian(groups, rewards, 1.0, 0.0, 0.0), zscore(rewards, groups))
    close(
        groups.sum(durian(groups, rewards, 0.6, 0.2, 0.2)),
        torch.zeros(groups.num, dtype=torch.float64),
    )
    alone = segments_of(torch.zeros(len(outcomes[0]), dtype=torch.int64))
    first = rewards[: len(outcomes[0])]
    for weights in ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
        close(durian(alone, first, *weights), adv.zscore(first, alone, eps=0.0, ddof=1))


@holds(OUTCOMES)
def test_pass_at_1_is_zscore(outcomes: list[list[bool]]) -> None:
    rewards, correct, groups = binary(outcomes)
    close(adv.pass_at_k(correct, torch.float64, groups, k=1), zscore(rewards, groups))


@holds(st.integers(2, 9), st.booleans(), st.data())
def test_groups_without_spread_give_zero(size: int, right: bool, data: st.DataObject) -> None:
    rewards, correct, groups = binary([[right] * size])
    lengths = torch.tensor([data.draw(LENGTHS) for _ in range(size)])
    alike = torch.zeros(size, dtype=torch.float64)
    durian = adv.durian(evidence(rewards, groups, mean_logprobs=alike, visual_entropy=alike))
    for found in (
        zscore(rewards, groups),
        adv.centered(rewards, groups),
        adv.rloo(rewards, groups),
        adv.opo(rewards, lengths, groups),
        adv.gpg(rewards, groups),
        adv.tree(rewards, groups),
        adv.apd(rewards, groups, eps=0.0),
        adv.mixed(rewards, rewards, correct, groups, eps=0.0, ddof=0),
        adv.pass_at_k(correct, torch.float64, groups, k=1),
        durian,
    ):
        assert not found.any()
    assert adv.signed(correct, torch.float64, positive=1.0, negative=1.0).all()


@holds(OUTCOMES, st.randoms(use_true_random=False))
def test_permutation_inside_groups(outcomes: list[list[bool]], source: object) -> None:
    """Shuffling all responses shuffles the advantages, for every estimator but krpo."""
    rewards, correct, groups = binary(outcomes)
    places = range(rewards.numel())
    order = torch.tensor(source.sample(places, len(places)))  # type: ignore[attr-defined]
    lengths = torch.arange(1, rewards.numel() + 1)
    mixed_up = segments_of(groups.index[order])

    def every(r: Tensor, c: Tensor, n: Tensor, g: Segments) -> list[Tensor]:
        return [
            zscore(r, g),
            adv.rloo(r, g),
            adv.opo(r, n, g),
            adv.reinforce_pp_baseline(r, n, g),
            adv.gpg(r, g),
            adv.tree(r, g),
            adv.lead(c, n, g.mean(r), g, eps=0.0, ddof=0),
            adv.pass_at_k(c, torch.float64, g, k=2),
            shaping.stcr(zscore(r, g), c, n, g),
        ]

    for plain, shuffled in zip(
        every(rewards, correct, lengths, groups),
        every(rewards[order], correct[order], lengths[order], mixed_up),
        strict=True,
    ):
        close(shuffled, plain[order])


RATIOS = st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(-3, 3)), min_size=1, max_size=8)


@holds(RATIOS)
def test_on_policy_gradients_equal_reinforce(tokens: list[tuple[float, float]]) -> None:
    advantages = torch.tensor([advantage for _, advantage in tokens], dtype=torch.float64)
    old = torch.tensor([value for value, _ in tokens], dtype=torch.float64) - 2

    def gradient(name: str) -> Tensor:
        logprobs = old.clone().requires_grad_()
        log_ratio = logprobs - old
        {
            "reinforce": lambda: losses.reinforce(logprobs, advantages),
            "ppo_clip": lambda: losses.ppo_clip(log_ratio, advantages, low=0.2, high=0.28),
            "dual": lambda: losses.ppo_clip(log_ratio, advantages, low=0.2, high=0.2, dual_c=3.0),
            "cispo": lambda: losses.cispo(logprobs, log_ratio, advantages, low=1.0, high=2.0),
            "ratio": lambda: losses.ratio(log_ratio, advantages),
            "sapo": lambda: losses.sapo(log_ratio, advantages, tau_pos=0.7, tau_neg=3.0),
        }[name]().sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    for name in ("ppo_clip", "dual", "cispo", "ratio", "sapo"):
        close(gradient(name), gradient("reinforce"))


@holds(RATIOS)
def test_gspo_with_one_token_responses_is_ppo_clip(tokens: list[tuple[float, float]]) -> None:
    log_ratio = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    ones = [1] * len(tokens)
    close(terms(flags(*ones), range(len(tokens)), ones).response_mean(log_ratio), log_ratio)


@holds(RATIOS)
def test_ppo_clip_bounds_reinforcement(tokens: list[tuple[float, float]]) -> None:
    """The clipped objective never exceeds the plain one; dual clipping never lowers the objective
    below dual_c A."""
    log_ratio, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    clipped = losses.ppo_clip(log_ratio, advantages, low=0.2, high=0.2)
    assert (clipped >= losses.ratio(log_ratio, advantages) - 1e-12).all()
    dual = losses.ppo_clip(log_ratio, advantages, low=0.2, high=0.2, dual_c=3.0)
    assert (dual <= clipped + 1e-12).all() and (
        dual[advantages < 0] <= -3 * advantages[advantages < 0] + 1e-12
    ).all()


@holds(st.integers(1, 6), st.integers(1, 6))
def test_token_mean_equals_sequence_mean_at_equal_lengths(responses: int, tokens: int) -> None:
    ids = torch.arange(responses).repeat_interleave(tokens)
    lengths = torch.full((responses,), tokens)
    close(
        aggregate.token_mean(responses * tokens, ids, torch.float64),
        aggregate.seq_mean_token_mean(responses, lengths, ids, torch.float64),
    )


@holds(st.lists(st.floats(-8, 8), min_size=1, max_size=8))
def test_k3_is_a_divergence(differences: list[float]) -> None:
    """k3 >= 0, 0 with zero gradient at the reference."""
    ref = torch.tensor(differences, dtype=torch.float64)
    assert (kl.k3(torch.zeros_like(ref), ref) >= 0).all()
    logprobs = ref.clone().requires_grad_()
    value = kl.k3(logprobs, ref)
    value.sum().backward()
    assert logprobs.grad is not None and not value.any() and not logprobs.grad.any()


@holds(st.integers(1, 200), st.integers(2, 60), st.floats(0.05, 1))
def test_overlong_penalty_is_monotone_and_bounded(length: int, limit: int, share: float) -> None:
    lengths = torch.tensor([length, length + 1])
    overlong = filters.Overlong(max_tokens=limit, buffer_share=share)
    now, longer = overlong.penalty(lengths, torch.float64).tolist()
    assert -1 <= longer <= now <= 0
    assert now == 0 or length > limit * (1 - share) - 1e-9
    assert length < limit or math.isclose(now, -1)
