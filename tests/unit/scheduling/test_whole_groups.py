"""Acceptance in prompt order, over-sampling, and what is given up early."""

import pytest

from megatron_rl.scheduling.end_of_step import StepRules
from megatron_rl.scheduling.whole_groups import Batch, KeptShare

FILTERED = StepRules(groups_per_step=2, responses_per_group=1, max_rounds=3)


def batch(admitted: int, rules: StepRules = FILTERED) -> Batch:
    return Batch(rules, step=0, start=10, admitted=admitted)


def test_the_first_wanted_groups_in_prompt_order_whatever_came_first() -> None:
    late = batch(admitted=4)
    for group, wanted in ((13, True), (12, True), (11, False)):
        late.judge(group, wanted=wanted)
        assert not late.is_complete and late.end is None, "group 10 may be wanted"
    late.judge(10, wanted=True)
    assert (late.decided(wanted=True), late.decided(wanted=False), late.end) == ([10, 12], [11], 13)


def test_a_refused_group_that_all_waited_for_lets_the_others_in() -> None:
    waiting = batch(admitted=3)
    waiting.judge(12, wanted=True)
    waiting.judge(11, wanted=True)
    assert not waiting.is_complete
    waiting.judge(10, wanted=False)
    assert (waiting.decided(wanted=True), waiting.end) == ([11, 12], 13)


def test_groups_behind_enough_wanted_ones_are_dropped_before_the_end_is_known() -> None:
    early = batch(admitted=5)
    early.judge(14, wanted=True)
    early.judge(11, wanted=True)
    assert list(early.drop_unneeded()) == [], "10, 12 and 13 may all be refused"
    early.judge(12, wanted=True)
    assert list(early.drop_unneeded()) == [13, 14]
    assert not early.is_complete and early.verdicts == {11: True, 12: True}


def test_at_its_limit_a_batch_has_what_it_found() -> None:
    poor = batch(admitted=6)
    for group in range(10, 16):
        poor.judge(group, wanted=group == 13)
    assert (poor.decided(wanted=True), poor.end, len(poor.decided(wanted=False))) == ([13], 16, 5)


def test_without_a_filter_the_end_is_known_from_the_start() -> None:
    plain = batch(0, StepRules(groups_per_step=2, responses_per_group=1, staleness=1))
    assert (plain.missing(1.0), plain.end, plain.version) == (2, 12, 0)
    assert StepRules(2, 1, staleness=1).version_of(7) == 6


@pytest.mark.parametrize(
    ("size", "share", "missing"),
    [
        (128, 1.0, 128),
        (128, 0.5, 272),  # (128 + sqrt(128 / 2)) / 0.5
        (3, 0.25, 18),  # (3 + sqrt(3 * 0.75)) / 0.25
        (128, 0.001, 1280),  # the limit
    ],
)
def test_more_are_sampled_than_are_missing(size: int, share: float, missing: int) -> None:
    rules = StepRules(groups_per_step=size, responses_per_group=1, max_rounds=10)
    assert Batch(rules, 0, 0).missing(share) == missing


def test_a_refusal_is_made_up_for_at_once() -> None:
    rules = StepRules(groups_per_step=4, responses_per_group=1, max_rounds=25)
    refill = Batch(rules, 0, 0)
    refill.admitted = refill.missing(1.0)
    refill.judge(2, wanted=False)
    assert refill.missing(1.0) == 1
    assert refill.missing(0.5) == 8  # (4 + sqrt(2)) / 0.5 = 10.8, and 3 are under way


def test_the_share_of_late() -> None:
    share = KeptShare()
    assert share.value == 1
    share.note(wanted=4, seen=9)
    assert share.value == 0.5
    share.note(wanted=0, seen=4)
    assert share.value == pytest.approx(3 / 9.5)
