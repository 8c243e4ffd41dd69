"""Token advantages, and the order statistics they read, against values worked out by hand."""

import torch
from torch import Tensor

from megatron_rl.loss.per_token import token_advantages
from megatron_rl.loss.whole_responses import WholeResponses, num_up_to_quantile
from tests.unit.loss.groups import flags, same, vector


def whole(index: list[int], mask: Tensor | None = None) -> WholeResponses:
    """Responses whose tokens are all here."""
    where = torch.tensor(index, dtype=torch.int64)
    every = torch.ones(len(index), dtype=torch.bool)
    return WholeResponses(where, every if mask is None else mask, 4, lambda columns: columns)


def test_zero_variance_by_hand() -> None:
    """Response 0 is of a group of which all are correct, 1 of one of both outcomes, 2 of one of
    which none is: its largest entropy is 2."""
    entropy = vector(1, 2, 5, 0.5, 2, 1.5)
    accuracy = vector(1, 0.25, 0)
    advantages = vector(0, 0, -0.7, 9, 9, 9)
    responses = whole([0, 0, 1, 2, 2, 2])
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    found = token_advantages.zero_variance(advantages, entropy, accuracy, index, responses)
    same(found, 0.1, 0.2, -0.7, -0.15, 0, -0.05)
    found = token_advantages.zero_variance(
        advantages, entropy, accuracy, index, responses, alpha=1.0
    )
    same(found, 1, 2, -0.7, -1.5, 0, -0.5)


def test_entropy_bonus_by_hand() -> None:
    """0.4 H = 0.4, 0.8, 0.2 against half of |A|: 0.5, 0.5, 0.05."""
    advantages = vector(1, -1, 0.1)
    entropy = vector(1, 2, 0.5)
    same(token_advantages.entropy_bonus(advantages, entropy), 1.4, -0.5, 0.15)
    found = token_advantages.entropy_bonus(advantages, entropy, alpha=1.0, kappa=4.0)
    same(found, 1.25, -0.75, 0.125)


def test_position_bonus_by_hand() -> None:
    """s(-7.5) = 0.000553, s(0) = 1/2, s(6) = 0.997527; half of |A| bounds it, and 0 stays 0."""
    place = vector(0, 0.5, 0.9, 0.9, 0.9)
    found = token_advantages.position_bonus(vector(1, 1, -1, 0.1, 0), place)
    same(found, 1.000055, 1.05, -1.099753, 0.15, 0)
    found = token_advantages.position_bonus(
        vector(2, -2), vector(0.25, 0.75), alpha=1.0, steepness=4.0
    )
    same(found, 2.268941, -2.731059)


def test_quantile_by_hand() -> None:
    """Of 0, 10, 20, 30, 40, 50 the 0.8-quantile has rank 4; of 1, 2, 4 it has rank 1.6:
    2 + 0.6 * 2; one value is its own quantile. Order does not matter, nor who is next to whom."""
    found = whole([1, 0, 0, 1, 0, 0, 1, 0, 0, 3]).quantile(
        vector(4, 50, 0, 1, 10, 40, 2, 20, 30, 7), 0.8
    )
    same(found, 3.2, 40, 40, 3.2, 40, 40, 3.2, 40, 40, 7)
    same(whole([0, 0]).quantile(vector(3, 1), 0.0), 1, 1)
    same(whole([0, 0]).quantile(vector(3, 1), 1.0), 3, 3)


def test_the_number_up_to_a_quantile_by_hand() -> None:
    """Ranks 0 to 4 of 6 values, 0 and 1 of 3, the only one of 1, none of 0."""
    assert num_up_to_quantile(torch.tensor([6, 3, 1, 0]), 0.8).tolist() == [5, 2, 1, 0]
    values = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    responses = whole([0] * 23 + [1] * 17)
    above = values > responses.quantile(values, 0.8)
    assert [int((~above[:23]).sum()), int((~above[23:]).sum())] == num_up_to_quantile(
        torch.tensor([23, 17]), 0.8
    ).tolist()


def test_what_takes_no_part_is_in_no_statistic() -> None:
    """The token of entropy 99 is outside the mask, and there is a NaN where another is."""
    responses = whole([0, 0, 0, 1], flags(1, 0, 1, 1))
    same(responses.quantile(vector(1, 99, 3, 5), 0.5)[[0, 2, 3]], 2, 2, 5)
    same(responses.maximum(vector(1, torch.nan, 3, 5))[[0, 2, 3]], 3, 3, 5)


def test_statistics_are_of_the_tokens_of_all_ranks() -> None:
    """The other rank holds the tokens 7 and 9 of response 1 and one column of padding."""
    theirs = torch.tensor([[1, 1, torch.nan], [7, 9, torch.nan]], dtype=torch.float64)
    responses = WholeResponses(
        torch.tensor([0, 1]), flags(1, 1), 2, lambda columns: torch.cat([columns, theirs], dim=1)
    )
    same(responses.maximum(vector(3, 8)), 3, 9)
    same(responses.quantile(vector(3, 8), 0.5), 3, 8)
    same(responses.quantile(vector(3, 1), 0.5), 3, 7)


def test_without_tokens_there_are_no_statistics() -> None:
    responses = whole([])
    assert responses.quantile(vector(), 0.8).shape == (0,)
    assert responses.maximum(vector()).shape == (0,)


def test_turn_discount_by_hand() -> None:
    """Two turns follow, one, none."""
    later = torch.tensor([2, 1, 0])
    same(token_advantages.turn_discount(vector(1, -2, 3), later, gamma=0.5), 0.25, -1, 3)
    same(token_advantages.turn_discount(vector(1, 1, 1), later), 0.9025, 0.95, 1)


def test_gigpo_by_hand() -> None:
    same(token_advantages.gigpo(vector(1, -2), vector(0.5, 4)), 1.5, 2)
    same(token_advantages.gigpo(vector(1, -2), vector(0.5, 4), omega=0.5), 1.25, 0)


def test_advantages_of_turns_by_hand() -> None:
    """Rewards 1, 0 and 1 after two, two and one turn, at gamma 1/2: the returns of the first turns,
    all in state 5, are 1/2, 0 and 1, those of the second, in state 7, are 1 and 0; another prompt
    has one turn in each of its states, and two equal ones in state 9."""
    rewards = vector(1, 1, 0, 0, 1, 1, 1, 1)
    later = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0])
    states = torch.tensor([5, 7, 5, 7, 5, 8, 9, 9])
    plain = token_advantages.advantages_of_turns(rewards, later, states, 0.5, "none")
    same(plain, 0, 0.5, -0.5, -0.5, 0.5, 0, 0, 0)
    # std of 1/2, 0, 1 by n - 1 is 1/2; that of 1, 0 is sqrt(1/2).
    scaled = token_advantages.advantages_of_turns(rewards, later, states, 0.5, "std")
    first, second = 0.5 / (0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)
    same(scaled, 0, second, -first, -second, first, 0, 0, 0)


def test_teacher_by_hand() -> None:
    """A - coef (log p - log q): the policy at -1 and -2, its teacher at -0.5 and -4; the policy has
    no gradient through it."""
    logprobs = vector(-1, -2).requires_grad_()
    found = token_advantages.teacher(vector(0, 1), logprobs, vector(-0.5, -4))
    assert not found.requires_grad
    same(found, 0.5, -1)
    found = token_advantages.teacher(vector(0, 1), logprobs, vector(-0.5, -4), coef=0.5)
    same(found, 0.25, 0)
