"""Verdicts on the answers of servers: all that is whole in one call, and what each is of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.rollouts.server_verdicts import Verdicts
from megatron_rl.types import Completion, Prompt, Sampling, Score
from tests.unit.trainer.fakes import prompts
from tests.unit.trainer.server_fakes import Fleet, publish, step

PROMPTS = prompts(7)


class Slow:
    """Keeps its first call until it is let go. A prompt in ``broken`` has no verdict."""

    def __init__(self, broken: str = "") -> None:
        self.go = threading.Event()
        self.calls: list[list[str]] = []
        self._broken = broken

    def __call__(self, asked: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        self.calls.append([prompt.uid for prompt in asked])
        assert self.go.wait(30.0)
        if self._broken in self.calls[-1]:
            raise ValueError(f"prompt {self._broken} has no answer")
        return list(map(score, asked, completions))


def score(prompt: Prompt, completion: Completion) -> Score:
    return Score(completion.token_ids[0] + sum(prompt.uid.encode()) / 1024, True)


def completions(*numbers: int) -> list[Completion]:
    return [Completion((number,), (-1.0,), False, 0) for number in numbers]


def judged(slow: Slow, at_most: int) -> list:
    """Seven groups of two; the first begins a call, in which the others come."""

    async def run() -> list:
        verdicts = Verdicts(slow, at_most)
        groups = [asyncio.ensure_future(verdicts.on(PROMPTS[0], completions(1, 2)))]
        while not slow.calls:
            await asyncio.sleep(0.001)
        for prompt in PROMPTS[1:]:
            groups.append(asyncio.ensure_future(verdicts.on(prompt, completions(3, 4))))
        await asyncio.sleep(0)
        slow.go.set()
        outcomes = await asyncio.gather(*groups, return_exceptions=True)
        verdicts.close()
        return outcomes

    return asyncio.run(run())


def test_a_call_has_all_that_came_during_the_last_one() -> None:
    slow = Slow()
    expected = [[score(PROMPTS[0], one) for one in completions(1, 2)]]
    expected += [[score(prompt, one) for one in completions(3, 4)] for prompt in PROMPTS[1:]]
    assert judged(slow, at_most=100) == expected
    assert slow.calls == [["p0"] * 2, [prompt.uid for prompt in PROMPTS[1:] for _ in range(2)]]


@pytest.mark.parametrize(("at_most", "in_call"), [(5, 4), (1, 2)])
def test_a_call_has_no_more_than_a_step_has_and_one_group_at_least(at_most, in_call) -> None:
    slow = Slow()
    assert judged(slow, at_most) == judged(Slow(), at_most=100)
    assert {len(call) for call in slow.calls[1:]} == {in_call}


def test_what_a_call_raises_is_told_to_all_of_it_and_to_no_other() -> None:
    outcomes = judged(Slow(broken="p4"), at_most=4)
    failed = [isinstance(outcome, ValueError) for outcome in outcomes]
    assert failed == [False] * 3 + [True] * 2 + [False] * 2
    assert str(outcomes[3]) == "prompt p4 has no answer"


def test_a_slow_reward_of_servers_is_called_once_for_all_that_has_come(start) -> None:
    slow = Slow()
    fleet = Fleet(registered={"a"})
    dispatcher = start(fleet, judge=slow)
    publish(dispatcher, fleet, 0)
    while sum(len(group["completions"]) for group in dispatcher.state()["groups"].values()) < 12:
        pass  # until those of two steps are there; the first group is with the judge
    slow.go.set()
    for group in step(dispatcher, fleet, 1):
        assert group.scores == [score(group.prompt, one) for one in group.completions]
    assert len(slow.calls) <= 4, "six groups: at least one, then as many as a step has"
    asked = [replace(prompt, uid=f"held-out:{prompt.uid}") for prompt in PROMPTS]
    dispatcher.generate(asked, Sampling(2, 4, seed=9))
    in_evaluation = [call for call in slow.calls if any(":" in uid for uid in call)]
    assert len(in_evaluation) <= 4, "seven prompts, as many as a step has at a time"
