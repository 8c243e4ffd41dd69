"""Advantage shaping against values worked out by hand."""

import torch

from megatron_rl.loss.per_response import shaping
from megatron_rl.loss.segments import segments_of
from tests.unit.loss.groups import flags, same, vector

LENGTHS = torch.tensor([2, 4, 5, 3, 2, 1000])  # mean correct length 3
CORRECT = flags(1, 1, 0, 0, 0, 0)
ONE_GROUP = segments_of(torch.zeros(6, dtype=torch.int64))


def test_stcr_by_hand() -> None:
    """mu = 2: alpha = 2 - 2^(3 - 5) = 1.75 at length 5, 2 at length 1000; not at length 3 (strict),
    not for shorter ones."""
    found = shaping.stcr(vector(1, 1, -1, -1, -1, -1), CORRECT, LENGTHS, ONE_GROUP, mu=2.0)
    same(found, 1, 1, -1.75, -1, -1, -2)


def test_stcr_default_mu() -> None:
    found = shaping.stcr(
        vector(0.5, -1),
        flags(1, 0),
        torch.tensor([10, 1010]),
        segments_of(torch.zeros(2, dtype=torch.int64)),
    )
    same(found, 0.5, -1.095158)


def test_stcr_multiplies_positive_advantages_unless_told() -> None:
    advantages = vector(1, 1, 1, 1, 1, -1)
    same(shaping.stcr(advantages, CORRECT, LENGTHS, ONE_GROUP, mu=2.0), 1, 1, 1.75, 1, 1, -2)
    negative = shaping.stcr(advantages, CORRECT, LENGTHS, ONE_GROUP, mu=2.0, only_negative=True)
    same(negative, 1, 1, 1, 1, 1, -2)


def test_stcr_without_a_correct_response_is_the_identity() -> None:
    same(shaping.stcr(vector(*[-1] * 6), flags(*[0] * 6), LENGTHS, ONE_GROUP, mu=2.0), *[-1] * 6)


def test_stcr_windows() -> None:
    """Two groups of which only the first has a correct response: the batch's mean length reaches
    the second."""
    correct = flags(1, 0, 0, 0)
    lengths = torch.tensor([2, 2, 3, 3])
    two = segments_of(torch.tensor([0, 0, 1, 1]))
    advantages = vector(1, -1, -1, -1)
    by_group = shaping.stcr(advantages, correct, lengths, two, mu=2.0, window="group")
    same(by_group, 1, -1, -1, -1)
    by_batch = shaping.stcr(advantages, correct, lengths, two, mu=2.0)
    same(by_batch, 1, -1, -1.5, -1.5)


def test_ddas_by_hand() -> None:
    """p = 1/4, omega 0.4: 0.2 * 2 / 0.5 + 0.3 * 2 / 0.866025."""
    found = shaping.ddas(
        vector(2, -2, 2, 2), vector(0.25, 0.64, 0, 1), torch.tensor(0.4, dtype=torch.float64)
    )
    same(found, 1.492820, -1.5, 2, 2)


def test_ass_by_hand() -> None:
    low = torch.tensor(0.25, dtype=torch.float64)
    high = torch.tensor(0.8, dtype=torch.float64)
    same(shaping.ass(vector(2, -2, 0), low, alpha=0.5), 1, -2, 0)
    same(shaping.ass(vector(2, -2, 0), low), 0.5, -2, 0)
    same(shaping.ass(vector(2, -2, 0), high, alpha=0.5), 2, -2, 0)


def test_sign_scale_by_hand() -> None:
    same(shaping.sign_scale(vector(1, -2, 0), positive=10.0, negative=0.5), 10, -1, 0)


def test_hard_and_easy_focused_by_hand() -> None:
    advantages = vector(1, -1, 1, 3, 3)
    accuracy = vector(0.25, 0.64, 0.75, 0, 1)
    same(shaping.hard_focused(advantages, accuracy), 1, -0.625, 0.577350, 3, 3)
    same(shaping.easy_focused(advantages, accuracy), 0.577350, -0.833333, 1, 3, 3)


def test_the_released_easy_term_by_hand() -> None:
    """At p = 0.75 it divides by 1 - 0.866025 + 1e-6 = 0.133976, the paper's by 0.5."""
    advantages = vector(1, -1, 3, 3)
    share = vector(0.75, 0.25, 0, 1)
    easy = shaping.easy_focused(advantages, share, easy_form="released")
    same(easy, 3.732023, -0.999998, 3, 3)
    omega = torch.tensor(0.4, dtype=torch.float64)
    found = shaping.ddas(advantages, share, omega, easy_form="released")
    same(found, 0.4 * 0.577350 + 0.6 * 3.732023, -0.4 - 0.6 * 0.999998, 3, 3)


def test_focal_by_hand() -> None:
    advantages = vector(1, -2, 5, 4)
    accuracy = vector(0.75, 0.75, 1, 0)
    same(shaping.focal(advantages, accuracy), 0.5, -1, 0, 4)
    same(shaping.focal(advantages, accuracy, gamma=2.0), 0.0625, -0.125, 0, 4)


def test_given_scale_by_hand() -> None:
    """Of the first and the third response, which were given."""
    found = [
        shaping.given_scale(vector(1, -2, -3), flags(1, 0, 1), **knobs)
        for knobs in ({}, {"scale": 0.5})
    ]
    same(found[0], 0, -2, 0)
    same(found[1], 0.5, -2, -1.5)


def test_confidence_gap_by_hand() -> None:
    """0.3 times 0.5 - 0.25 and 0.5 - 0.75 where a response is correct, be they all; nothing where p
    is 0."""
    share = vector(0.5, 0.5, 1, 0)
    confidence = vector(0.25, 0.75, 0.25, 0.25)
    found = shaping.confidence_gap(vector(1, -1, 0.5, -2), share, vector(*[0.5] * 4), confidence)
    same(found, 1.075, -1.075, 0.575, -2)
    found = shaping.confidence_gap(
        vector(1, -1, 0, 0), share, vector(*[0.5] * 4), confidence, alpha=2.0
    )
    same(found, 1.5, -1.5, 0.5, 0)


def test_perplexity_by_hand() -> None:
    """log PPL 1, 2, 3, 2 have the mean 2 and the variance 1/2, so w = -1.414214, 0, 1.414214, 0;
    two that are alike have no w."""
    groups = segments_of(torch.tensor([0, 0, 0, 0, 1, 1]))
    logprobs = vector(-1, -2, -3, -2, -5, -5)
    advantages = vector(1, -1, 2, 0, 1, -1)
    found = shaping.perplexity(advantages, logprobs, groups)
    same(found, 1.014142, -1, 1.971716, 0, 1, -1)
    found = shaping.perplexity(advantages, logprobs, groups, alpha=0.5)
    same(found, 1.707107, -1, 0.585786, 0, 1, -1)


def test_the_released_perplexity_by_hand() -> None:
    """The quartiles of 1, 2, 2, 3, 12 are 2 and 3: 12 is above 3 + 1.5 and stays out of the mean 2
    and the variance 1/2, so its w is 14.142136. The group below is the same upside down."""
    groups = segments_of(torch.tensor([0] * 5 + [1] * 5))
    logprobs = vector(-1, -2, -2, -3, -12, -12, -11, -11, -10, -1)
    found = [
        shaping.perplexity(vector(*[1] * 10), logprobs, groups, alpha=alpha, form="released")
        for alpha in (0.01, 0.1)
    ]
    half = (1.014142, 1, 1, 0.985858)
    same(found[0], *half, 0.858579, *half[::-1], 1.141421)
    half = (1.141421, 1, 1, 0.858579)
    same(found[1], *half, 0.8, *half[::-1], 1.2)


def test_tail_confidence_by_hand() -> None:
    """Row 0: of six tokens 0.2 * 6 = 1.2, so the two least likely, -4 and -3: exp(-3.5). Row 1: one
    token, itself. Row 2: none. Row 3: of five exactly one, -1.5."""
    logprobs = vector(-1, -0.5, -4, -2, -0.1, -3, -0.2, -0.7, -0.1, -1.5, -0.3, -0.4)
    index = torch.tensor([0, 1, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3])
    found = shaping.tail_confidence(logprobs, index, 4, tail=0.2)
    same(found, 0.030197, 0.606531, 1, 0.223130)
    found = shaping.tail_confidence(logprobs, index, 4, tail=1.0)
    same(found, 0.179664, 0.606531, 1, 0.548812)  # exp(-10.3 / 6), exp(-3 / 5)


def test_a_share_that_is_whole_but_for_rounding_is_not_rounded_up() -> None:
    """0.2 * 35 is 7.000000000000001 in float64: the eighth token takes no part."""
    logprobs = vector(*[-7.0] * 7, *[-1.0] * 28)
    found = shaping.tail_confidence(logprobs, torch.zeros(35, dtype=torch.int64), 1, tail=0.2)
    same(found, 0.000912, tolerance=1e-6)
