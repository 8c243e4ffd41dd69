"""Rewards in another thread: in order, all that has come in one call, errors where they are asked
for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from megatron_rl.rollouts.reward_thread import RewardThread, Unscored
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Completion, Prompt, Score

PROMPT = Prompt("p", (1,), "7", "toy")


class Held:
    """A reward that answers when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[list[str]] = []

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        self.calls.append(list(texts))
        assert self.go.wait(30)
        if "9" in texts:
            raise ValueError("nine is not judged")
        return [Score(float(text), text == "7") for text in texts]


def judge_of_held() -> tuple[RewardThread, Held]:
    reward = Held()
    return RewardThread(reward, lambda ids: str(ids[0])), reward


def give(judge: RewardThread, *numbers: int) -> None:
    for number in numbers:
        judge.give(Request(0, number, 0), PROMPT, Completion((number,), (-1.0,), False, 0))


def numbered(scores: list[tuple[Unscored, Score]]) -> list[tuple[int, Score]]:
    return [(one.request.group, score) for one, score in scores]


def until_told(judge: RewardThread) -> list[tuple[Unscored, Score]]:
    ends_at = time.monotonic() + 30
    while time.monotonic() < ends_at:
        if told := judge.take():
            return told
        time.sleep(0.001)
    raise AssertionError("no verdict came")


def test_who_asks_does_not_wait_and_the_next_call_has_all_that_came_meanwhile() -> None:
    judge, reward = judge_of_held()
    give(judge, 5)
    assert judge.take() == [], "the call has begun, and nobody waits for it"
    give(judge, 7, 6)
    assert judge.take() == []
    give(judge, 8)
    reward.go.set()
    assert numbered(until_told(judge)) == [(5, Score(5.0, False))]
    assert [score.reward for _, score in until_told(judge)] == [7, 6, 8]
    assert reward.calls == [["5"], ["7", "6", "8"]]


def test_what_the_reward_raises_is_raised_where_verdicts_are_taken() -> None:
    judge, reward = judge_of_held()
    reward.go.set()
    give(judge, 9)
    with pytest.raises(ValueError, match="nine is not judged"):
        until_told(judge)


def test_what_is_forgotten_gives_no_verdict_to_those_who_come_later() -> None:
    judge, reward = judge_of_held()
    give(judge, 5)
    judge.take()
    give(judge, 6)
    judge.forget()
    reward.go.set()
    give(judge, 7)
    assert numbered(until_told(judge)) == [(7, Score(7.0, True))]
    assert reward.calls == [["5"], ["7"]]


def test_a_call_has_at_most_so_many_responses_and_wakes_who_waits() -> None:
    reward = Held()
    woken = threading.Semaphore(0)
    judge = RewardThread(reward, lambda ids: str(ids[0]), at_most=2, wake=woken.release)
    reward.go.set()
    give(judge, 5, 6, 7)
    assert judge.take() == []
    assert woken.acquire(timeout=30)
    assert len(judge.take()) == 2 and woken.acquire(timeout=30)
    assert numbered(judge.take()) == [(7, Score(7.0, True))]
    judge.close()
