"""Sampling hooks: what they want by hand, and what becomes of a step, rows, tokens and state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.data.loader import PromptLoader
from megatron_rl.hooks import Ask, Resample, SamplingHook, ScoredGroup
from megatron_rl.hooks.sampling import Ampo, Dars, Erpo, Ghpo, Vcrl, relative_variance, second_round
from megatron_rl.reporting.metrics import metric
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.hooks.resampling import Resampling
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.experience import Experience
from megatron_rl.types import DEMONSTRATED, GUIDES, HINTS, Completion, Prompt, Sampling, Score
from tests.engines import Answering
from tests.rollout_sources import rollouts_of, training_job
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.runs import DISPLAY, WORLD

PROMPTS = prompts(8)


def group(number: int, num_correct: int, size: int = 4) -> ScoredGroup:
    scores = [Score(float(place < num_correct), place < num_correct) for place in range(size)]
    return ScoredGroup(PROMPTS[number], scores)


@pytest.mark.parametrize(
    ("num_correct", "size", "expected"),
    [
        (0, 4, 0),
        (1, 4, 3 / 4),
        (2, 4, 1),
        (4, 4, 0),
        (1, 5, 4 / 6),
        (2, 5, 1),
        (3, 5, 1),
        (1, 1, 0),
    ],
)
def test_relative_variance_by_hand(num_correct: int, size: int, expected: float) -> None:
    assert relative_variance(group(0, num_correct, size)) == pytest.approx(expected)


def test_vcrl_fills_up_with_the_prompts_that_varied_most() -> None:
    hook = Vcrl(kappa=0.5, later_kappa=0.9, later_from=3, momentum=0.5)
    first = hook.resample(1, 0, [group(0, 1), group(1, 2), group(2, 4)])
    assert first.keep == [True, True, False] and not first.asks, "nothing to fill up with"
    # p1 has 1, p0 has 3/4. Two groups are refused, so both come again.
    second = hook.resample(2, 0, [group(3, 0), group(4, 2), group(5, 4)])
    assert second.keep == [False, True, False]
    assert second.asks == [Ask(PROMPTS[1], 4), Ask(PROMPTS[0], 4)]
    after = hook.resample(2, 1, [group(4, 2), group(1, 0), group(0, 1)])
    assert not after.asks and after.keep is None
    assert after.metrics == {"replayed_variance_mean": 3 / 8}
    # p1: 1/2 of 1 and 0; p0 stays at 3/4; p4 has 1 and is in the step.
    third = hook.resample(3, 0, [group(4, 1), group(6, 2)])
    assert third.keep == [False, True], "3/4 is below the later threshold"
    assert third.asks == [Ask(PROMPTS[0], 4)]


def test_a_vcrl_step_has_a_group_though_nothing_varies() -> None:
    hook = Vcrl(kappa=1.0)
    assert hook.resample(1, 0, [group(0, 0), group(1, 1), group(2, 4)]).keep == [False, True, False]


def test_the_bank_of_vcrl_is_bounded_and_goes_on() -> None:
    hook = Vcrl(capacity=2)
    again = replace(PROMPTS[2], uid="p2#2")
    hook.resample(1, 0, [group(0, 1), group(1, 2), ScoredGroup(again, group(2, 2).scores)])
    assert hook.state() == {"bank": {"p1": 1.0, "p2#2": 1.0}}
    other = Vcrl(capacity=2)
    other.restore(hook.state(), PROMPTS)
    wanted = other.resample(2, 0, [group(5, 0), group(6, 0)])
    assert wanted.asks == [Ask(PROMPTS[1], 4), Ask(again, 4)]
    assert wanted == hook.resample(2, 0, [group(5, 0), group(6, 0)])


@pytest.mark.parametrize(
    ("schedule", "of_eight", "of_four"),
    [("et", [27, 11, 3, 1, 0, 0, 0, 0, 0], [6, 2, 0]), ("hw", [56, 24, 8, 3, 0], [12, 4, 0])],
)
def test_the_second_round_of_dars_by_hand(
    schedule: str, of_eight: list[int], of_four: list[int]
) -> None:
    """None of 8: a = 1/16, S = 15/128, et (4 - 15/16) / S = 26.1, hw (7.5 - 15/16) / S = 56; 2 of
    8: S = 3/8, et 8/3, hw (6 - 3) / S = 8."""
    assert [second_round(right, 8, schedule) for right in range(len(of_eight))] == of_eight
    assert [second_round(right, 4, schedule) for right in range(3)] == of_four
    assert second_round(0, 0, schedule) == 0


def test_dars_has_one_second_round_and_keeps_what_varies() -> None:
    first = [group(0, 0, 8), group(1, 2, 8), group(2, 8, 8), group(3, 4, 8)]
    for hook, of_none, of_two in (
        (Dars(), 24, 3),
        (Dars(schedule="hw", max_responses=64), 56, 8),
        (Dars(schedule="hw", max_responses=9), 1, 1),
    ):
        asked = hook.resample(1, 0, first)
        assert asked.asks == [Ask(PROMPTS[0], of_none, into=0), Ask(PROMPTS[1], of_two, into=1)]
        assert asked.keep is None
        assert asked.metrics == {"hard_groups": 2, "asked_responses": of_none + of_two}
        second = hook.resample(1, 1, [group(0, 0, 32), group(1, 2, 11), *first[2:]])
        assert not second.asks and second.keep == [False, True, False, True]
        assert second.metrics == {"dropped_groups": 2}
    none = Dars().resample(1, 0, [group(0, 8, 8), group(1, 4, 8)])
    assert not none.asks and none.keep == [False, True]
    assert Dars().resample(1, 1, [group(0, 4, 4), group(1, 6, 6)]).keep == [False, True]


def test_erpo_warms_prompts_that_were_all_right() -> None:
    hook = Erpo(increase=0.25, highest=1.4)
    hook.resample(1, 0, [group(0, 4), group(1, 3)])
    assert [hook.temperature(PROMPTS[number], 1.0) for number in (0, 1, 2)] == [1.25, 1.0, 1.0]
    seen = hook.resample(2, 0, [group(0, 4), group(1, 4)])
    assert seen.metrics == {"residual_groups": 2, "hot_groups": 1}
    other = Erpo(increase=0.25, highest=1.4)
    other.restore(hook.state(), PROMPTS)
    for each in (hook, other):
        assert [each.temperature(PROMPTS[number], 1.0) for number in (0, 1)] == [1.4, 1.25]
    hook.resample(3, 0, [group(0, 3)])
    assert hook.temperature(PROMPTS[0], 1.0) == 1.0


def test_the_hints_of_ghpo_by_hand() -> None:
    """p0 has two hints, p1 one, p2 none. All are wrong; then p0 with its first hint; then with its
    second, which stays."""
    forms = [
        {"ratio": ratio, "token_ids": (1, at), "text": f"{at}"}
        for at, ratio in ((5, 0.25), (6, 0.5))
    ]

    def of(number: int, num_correct: int, hints: list, **extra: float) -> ScoredGroup:
        plain = group(number, num_correct)
        return plain._replace(prompt=replace(plain.prompt, extra={HINTS: hints, **extra}))

    hook = Ghpo(from_step=2)
    wrong = [of(0, 0, forms), of(1, 0, forms[:1]), group(2, 0), of(3, 1, forms)]
    unjudged = ScoredGroup(wrong[0].prompt, [], 4)
    assert (
        hook.resample(1, 0, wrong).asks == hook.resample(2, 0, [unjudged, group(2, 0)]).asks == []
    )
    first = hook.resample(2, 0, wrong)
    p0, p1 = (ask.prompt for ask in first.asks)
    assert first.keep == [False, False, True, True]
    assert [ask._replace(prompt=p0) for ask in first.asks] == [Ask(p0, 4)] * 2
    assert (p0.uid, p0.token_ids, p0.text, p0.answer) == ("p0+0.25", (1, 5), "5", PROMPTS[0].answer)
    assert p0.extra == {HINTS: forms[1:], "hint_ratio": 0.25}
    assert first.metrics == {"hinted_groups": 0, "unsolved_groups": 3}
    second = hook.resample(
        2, 1, [*wrong[2:], wrong[0]._replace(prompt=p0), wrong[3]._replace(prompt=p1)]
    )
    (ask,) = second.asks
    assert second.keep == [True, True, False, True]
    assert (ask.prompt.uid, ask.prompt.token_ids) == ("p0+0.5", (1, 6)) and not ask.prompt.extra[
        HINTS
    ]
    last = hook.resample(2, 2, [*wrong[2:], wrong[0]._replace(prompt=ask.prompt)])
    assert not last.asks and last.keep is None
    assert last.metrics == {"hinted_groups": 1, "unsolved_groups": 2}


class Telling(Answering):
    """One token, which says what was asked: the uid without its end, the temperature, the seed."""

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        prompt_number = int(prompt.uid.partition("/")[0][1:])
        tenths = round(sampling.temperature * 10)
        ids = [prompt_number, tenths, (sampling.seed or 0) % 1009, len(self.begun)]
        completion = Completion(ids, [-0.5] * 4, False, 3)
        if not sampling.expert_width:
            return completion
        # The first expert is the number of the prompt, the second says which response it is.
        of_all = np.array([[prompt_number, ids[3]]] * (len(prompt.token_ids) + 4), np.uint8)
        return replace(completion, experts=of_all)


class Odd:
    """Right for prompts with an odd number."""

    def score(self, prompts, texts, truncated) -> list[Score]:
        numbers = [int(text.split()[0]) for text in texts]
        return [Score(float(number % 2), number % 2 == 1) for number in numbers]


class RightOnes:
    """Right for the responses that were begun with these numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def score(self, prompts, texts, truncated) -> list[Score]:
        right = [int(text.split()[3]) in self.numbers for text in texts]
        return [Score(float(each), each) for each in right]


def rollouts(
    reward: Odd | RightOnes | None = None, expert_width: int = 0, **hooks: SamplingHook
) -> Rollouts:
    """Four prompts a step, two responses each."""
    sampler = LaunchSampler(
        Telling(), reward or Odd(), lambda ids: " ".join(map(str, ids)), WORLD, DISPLAY
    )
    job = training_job(
        PromptLoader(PROMPTS, seed=1, shuffle=False),
        Sampling(2, 4, expert_width=expert_width),
        seed=1,
        prompts_per_step=4,
        hooks=Resampling(hooks, PROMPTS),
    )
    return rollouts_of(sampler, job)


def tokens(experience: Experience) -> list[list[int]]:
    held = experience.responses.tokens
    assert held.rows.tolist() == list(range(len(experience.responses)))
    return [ids.tolist() for ids in held.views("token_ids")]


def test_what_is_asked_joins_its_group() -> None:
    # One of p1's is right, both of p3's. Of p0 and p2 none is: two more, one of p0's is right.
    dars = Dars(schedule="hw", max_responses=5)
    experience = rollouts(RightOnes(3, 7, 8, 10), dars=dars).collect(1)
    assert experience.group_ids.tolist() == [0] * 4 + [1] * 2
    uids = [*["p0"] * 4, *["p1"] * 2]
    assert [prompt.uid for prompt in experience.responses.prompts] == uids
    rows = tokens(experience)
    assert [ids[0] for ids in rows] == [0] * 4 + [1] * 2
    seeds = [ids[2] - rows[0][2] for ids in rows[:4]]
    assert seeds == [0, 0, 1, 1], "the second round has a seed of its own"
    assert len({ids[3] for ids in rows}) == len(rows), "no response twice"
    assert experience.hook_metrics["hook/dars/asked_responses"] == 4
    assert experience.hook_metrics["hook/dars/dropped_groups"] == 2
    assert all(metric(key) for key in experience.hook_metrics)


def guided(number: int, num_correct: int, *numbers: int) -> ScoredGroup:
    """Its prompt brings responses along, of one token each."""
    given = [Completion((each,), (0.0,), False, DEMONSTRATED) for each in numbers]
    of_group = group(number, num_correct)
    return of_group._replace(prompt=replace(of_group.prompt, extra={GUIDES: given}))


def test_what_ampo_wants_by_hand() -> None:
    """All three of a group that is all wrong, for two of its own; one of one for one. Nothing for
    the group with a right response, nor for those without guides or without a verdict."""
    unjudged = guided(4, 0, 9)._replace(scores=[], num_unjudged=4)
    groups = [guided(0, 1, 5), guided(1, 0, 5, 6, 7), group(2, 0), guided(3, 0, 8), unjudged]
    wanted = Ampo().resample(1, 0, groups)
    three, one = (groups[at].prompt.extra[GUIDES] for at in (1, 3))
    first, second = Ask(groups[1].prompt, 3, 1, three, 2), Ask(groups[3].prompt, 1, 3, one, 1)
    assert wanted.asks == [first, second] and wanted.keep is None
    assert wanted.metrics == {"unsolved_groups": 3, "guided_groups": 2}
    assert Ampo(replaces=1).resample(1, 0, groups).asks[0].replaces == 1
    assert Ampo().resample(1, 1, groups) == Resample(), "what was given has joined"


class Dropping(SamplingHook):
    """The first group leaves; one response to a prompt of an earlier step comes in its place."""

    def temperature(self, prompt: Prompt, plain: float) -> float:
        return 1.5 if prompt.uid == "p1" else plain

    def resample(self, step: int, turn: int, groups: list[ScoredGroup]) -> Resample:
        if turn:
            return Resample()
        keep = [number > 0 for number in range(len(groups))]
        return Resample([Ask(PROMPTS[7], 1)], keep, {"dropped": 1.0})


def test_groups_leave_and_others_come() -> None:
    experience = rollouts(dropping=Dropping()).collect(1)
    rows = tokens(experience)
    assert [ids[0] for ids in rows] == [1, 1, 2, 2, 3, 3, 7]
    assert experience.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert [ids[1] for ids in rows] == [15, 15, 10, 10, 10, 10, 10], "temperatures"
    assert experience.dropped_tokens == 8 and experience.discarded_tokens == 0
    assert np.isfinite(experience.rewards.numpy()).all()


def test_experts_stay_with_their_responses() -> None:
    experience = rollouts(expert_width=2, dropping=Dropping()).collect(1)
    experts = experience.responses.experts
    assert experts is not None and experts.rows.tolist() == list(range(7))
    for ids, of_tokens in zip(tokens(experience), experts.views("experts"), strict=True):
        assert np.unique(of_tokens, axis=0).tolist() == [[ids[0], ids[3]]]


def test_two_steps_and_a_restored_one_are_three() -> None:
    def made() -> Rollouts:
        return rollouts(erpo=Erpo(increase=0.5, highest=2.0), vcrl=Vcrl(kappa=0.0))

    whole = made()
    found = [tokens(whole.collect(step)) for step in (1, 2, 3, 4)]
    first = made()
    for step in (1, 2):
        first.collect(step)
    second = made()
    second.restore(first.state())
    again = [tokens(second.collect(step)) for step in (3, 4)]
    firsts = [[[ids[:3] for ids in step] for step in steps] for steps in (again, found[2:])]
    assert firsts[0] == firsts[1]
    assert any(ids[1] == 15 for step in again for ids in step), "prompts come back warmer"


class Greedy(Dropping):
    def resample(self, step: int, turn: int, groups: list[ScoredGroup]) -> Resample:
        return Resample(keep=[False] * len(groups))


class Endless(Dropping):
    def resample(self, step: int, turn: int, groups: list[ScoredGroup]) -> Resample:
        return Resample([Ask(groups[0].prompt, 1, into=0)])


@pytest.mark.parametrize(
    ("hook", "words"), [(Greedy(), "dropped every group"), (Endless(), "asked 64 times in step 1")]
)
def test_a_hook_without_an_end_is_refused(hook: SamplingHook, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rollouts(bad=hook).collect(1)
