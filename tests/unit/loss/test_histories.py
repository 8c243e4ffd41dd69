"""DCPO's standardization over the visits of a prompt, by hand."""

import torch
from torch import Tensor

from megatron_rl.loss.per_response import histories
from megatron_rl.loss.segments import segments_of
from tests.unit.loss.groups import ragged, same, vector


def earlier(num: int, visits: int, mean: float, var: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same for every response."""
    of_all = (torch.full((num,), value, dtype=torch.float64) for value in (mean, var))
    return torch.full((num,), visits), *of_all


def test_the_first_visit_is_zscore_with_the_sample_std() -> None:
    """Of 1, 0, 0, 0: mean 0.25, sample std 0.5; whatever the history says, for there is none."""
    rewards, groups = ragged([1.0, 0.0, 0.0, 0.0], [1.0, 1.0])
    found = histories.smoothed(rewards, groups, *earlier(6, 0, 9.0, 9.0), 0.0)
    same(found[:4], 1.5, -0.5, -0.5, -0.5)
    same(histories.smoothed(rewards, groups, *earlier(6, 0, 0.0, 0.0), 0.0)[4:], 0, 0)


def test_smoothed_by_hand() -> None:
    """Third visit; the two before had mean 0.25 and variance 0.25. Of 1, 1, 0, 0: A_new =
    0.866025; mean' = 1/3, var' = (0.5 + 1/3 + 2/3 * 0.0625) / 3 = 0.291667, so A_all = 1.234427 and
    -0.617213. Of the mixtures with 2/3 and 1/3 the smaller: 0.988826 before 1.111626, -0.700151
    before -0.783088."""
    rewards, groups = ragged([1.0, 1.0, 0.0, 0.0])
    found = histories.smoothed(rewards, groups, *earlier(4, 2, 0.25, 0.25), 0.0)
    same(found, 0.988826, 0.988826, -0.700151, -0.700151)


def test_a_group_without_spread_still_has_advantages_by_hand() -> None:
    """mean' = 0.5, var' = (0.5 + 0 + 2/3 * 0.5625) / 3 = 0.291667: A_all = 0.925820, a third of
    it."""
    rewards, groups = ragged([1.0, 1.0])
    found = histories.smoothed(rewards, groups, *earlier(2, 2, 0.25, 0.25), 0.0)
    same(found, 0.308607, 0.308607)


def test_a_prompt_whose_visits_were_all_alike_has_none_whatever_the_rounding() -> None:
    """The mean of three float64 numbers 0.1 is above 0.1, that of five is 0.1."""
    for dtype in (torch.float32, torch.float64):
        past = (0, 0.0, 0.0)
        for size in (3, 5, 3, 10, 7, 6):
            alike = torch.full((size,), 0.1, dtype=dtype)
            groups = segments_of(torch.zeros(size, dtype=torch.int64))
            visits, mean, var = earlier(size, *past)
            found = histories.smoothed(alike, groups, visits, mean, var, 0.0)
            assert found.dtype == dtype and not found.any()
            after = histories.after_visit(alike, groups, visits, mean, var)
            past = tuple(values[0].item() for values in after)
        assert past[0] == 6 and past[2] == 0


def test_after_visit_by_hand() -> None:
    """Two groups: 1, 0 at their first visit (sample variance 0.5), 1, 1 at their third."""
    rewards, groups = ragged([1.0, 0.0], [1.0, 1.0])
    visits = torch.tensor([0, 0, 2, 2])
    found = histories.after_visit(
        rewards, groups, visits, vector(7, 7, 0.25, 0.25), vector(0, 0, 0.25, 0.25)
    )
    assert found[0].tolist() == [1, 1, 3, 3]
    same(found[1], 0.5, 0.5, 0.5, 0.5)
    same(found[2], 0.5, 0.5, 0.291667, 0.291667)
