"""Responses that go on: their tokens and versions by hand; groups that are open, saved, refused."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.rollouts.exchange import token_versions
from megatron_rl.rollouts.partial_groups import Answer, PartialGroups, cut, joined
from megatron_rl.scheduling.partial import PartialRules
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Score, VersionSpan
from tests.unit.trainer.fakes import prompts

RULES = PartialRules(groups_per_step=2, responses_per_group=2, groups_in_flight=4, max_age=3)
FIRST = Completion((5, 6), (-0.5, -0.25), truncated=False, weight_version=3)
MORE = Completion((7,), (-1.0,), truncated=True, weight_version=4)


def test_what_came_later_stands_behind_with_its_own_version() -> None:
    whole = joined(FIRST, MORE)
    assert list(whole.token_ids) == [5, 6, 7]
    assert list(whole.sampler_logprobs) == [-0.5, -0.25, -1.0]
    assert whole.spans == (VersionSpan(3, 2), VersionSpan(4, 3))
    assert token_versions([whole, FIRST]).tolist() == [3, 3, 4, 3, 3]
    assert (whole.truncated, whole.weight_version) == (True, 3)
    assert joined(None, MORE) is MORE


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (1, (VersionSpan(3, 1),)),
        (2, (VersionSpan(3, 2),)),
        (3, (VersionSpan(3, 2), VersionSpan(4, 3))),
    ],
)
def test_a_cut_response_has_its_first_tokens_and_has_not_ended(length, spans) -> None:
    shorter = cut(joined(FIRST, MORE), length)
    assert shorter.token_ids == array("i", [5, 6, 7][:length])
    assert shorter.sampler_logprobs == array("f", [-0.5, -0.25, -1.0][:length])
    assert shorter.spans == spans
    assert (shorter.truncated, shorter.weight_version) == (False, 3)


def groups(num_prompts: int = 3, rules: PartialRules = RULES) -> PartialGroups:
    return PartialGroups(PromptLoader(prompts(num_prompts), seed=1, shuffle=False), rules)


def uids(opened: PartialGroups) -> dict[int, str]:
    return {number: opened[number].prompt.uid for number in opened}


def test_a_prompt_that_is_open_already_gets_a_uid_that_nobody_has() -> None:
    opened = groups()
    opened.admit(1)
    assert uids(opened) == {0: "p0", 1: "p1", 2: "p2", 3: "p0#2"}
    opened.close(0)
    opened.close(1)
    opened.admit(2)
    assert uids(opened) == {2: "p2", 3: "p0#2", 4: "p1", 5: "p2#2"}
    opened.close(2)
    opened.admit(3)
    assert uids(opened)[6] == "p0", "the second one alone is open"


def test_what_is_saved_goes_on_with_its_tokens_and_verdicts() -> None:
    opened = groups()
    opened.admit(1)
    opened.close(1)
    opened.note(2, 0, Answer(joined(FIRST, MORE), Score(0.5, True, {"accuracy": 1.0})))
    opened.note(3, 1, Answer(FIRST, None))
    opened.note(3, 0, Answer(Completion((), (), False, 3), None))
    other = groups()
    other.restore(opened.state())
    opened.admit(2)
    other.admit(2)
    assert {number: opened[number] for number in opened} == {n: other[n] for n in other}
    assert other.num_tokens == 5
    assert other.so_far(Request(2, 3, 1)) == FIRST
    assert other.length(Request(2, 3, 0)) == 0
    waiting = {each.request for each in assigned(other)}
    assert Request(2, 2, 0) not in waiting, "it has ended"
    assert {Request(2, 2, 1), Request(2, 3, 0), Request(2, 3, 1)} <= waiting


def assigned(opened: PartialGroups) -> list:
    scheduler = opened.scheduler(2)
    scheduler.queue.join("one", 100, 2)
    return scheduler.assign()


def test_a_state_of_another_run_is_refused_and_changes_nothing() -> None:
    opened = groups()
    opened.admit(1)
    plain = PromptLoader(prompts(3), seed=1, shuffle=False)
    for state, rules, words in (
        (plain.state(), RULES, "of a run without source.partial"),
        (opened.state(), replace(RULES, groups_in_flight=3), "groups_in_flight is 3"),
    ):
        other = groups(rules=rules)
        with pytest.raises(ValueError, match=words):
            other.restore(state)
        other.admit(5)
        assert {other[number].first_step for number in other} == {5}
