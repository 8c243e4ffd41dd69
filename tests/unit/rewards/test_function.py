"""Reward functions of one's own: what they are given, what they may return, and what happens when
they fail."""

from __future__ import annotations

import os
import resource
import time

import pytest

from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.workers import function_worker
from megatron_rl.types import Prompt
from tests.unit.rewards.cases import config, prompt, restarts

FUNCTIONS = """
import asyncio
import os
import sys
import time

calls = 0

def right(tasks, responses):
    return [float(task.answer in response) for task, response in zip(tasks, responses)]

def seen(tasks, responses):
    return [{"reward": 3.0, "accuracy": 1, "uid": len(task.uid), "text": len(task.text), "extra":
    task.extra["n"]} for task in tasks]

async def slow_service(tasks, responses):
    async def ask(task):
        await asyncio.sleep(1)
        return 1
    return await asyncio.gather(*(ask(task) for task in tasks))

def counts(tasks, responses):
    global calls
    calls += 1
    print("{this is no reply}", flush=True)
    return [{"reward": calls, "pid": os.getpid()}] * len(responses)

def mixed(tasks, responses):
    return [1, True, float("nan"), float("inf"), "1", None, {"accuracy": 1}, {"reward": 1,
    "accuracy": 2}, {"reward": 1, "format": 1},
            {"reward": -2, "accuracy": 1.0}]

def recovers(tasks, responses):
    # "22" has its verdict in the second call, "333" in the third.
    global calls
    calls += 1
    return [{"reward": calls, "accuracy": 1} if len(text) <= calls else None for text in responses]

def does(tasks, responses):
    what = responses[0]
    if what == "hang":
        time.sleep(100)
    if what == "die":
        os._exit(1)
    if what == "short":
        return [1.0]
    if what == "dict":
        return {"reward": 1.0, "parts": 2.0}
    if what == "set":
        return {1.0, 0.0}
    if what == "raise":
        raise RuntimeError("the service is down")
    if what == "exit":
        sys.exit(3)
    return [1.0] * len(responses)

def one_argument(responses):
    return responses

value = 3
"""


@pytest.fixture
def function(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    made = []

    def make(name, prompt_text=None, **changes):
        made.append(
            build_reward(config(verifier="auto", function=f"{path}:{name}", **changes), prompt_text)
        )
        made[-1].check([prompt()])
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def score(reward, *responses, answer="4"):
    return reward.score(
        [prompt(answer)] * len(responses), list(responses), [False] * len(responses)
    )


def test_a_number_is_the_reward_and_one_is_correct(function):
    reward = function("right", accuracy_weight=2.0, format_pattern="<.*>", format_weight=0.5)
    wrong, right, formed = score(reward, "5", "4", "<4>")
    assert (wrong.reward, wrong.correct) == (0, False)
    assert (right.reward, right.correct) == (2, True)
    assert (formed.reward, formed.correct) == (2.5, True)
    assert formed.parts == {"accuracy": 1.0, "format": 1.0, "function": 1.0}


def test_a_mapping_names_reward_accuracy_and_parts(function):
    reward = function("seen", prompt_text=lambda prompt: "four")
    task = Prompt("toy:77", (1,), "4", "toy", {"n": 5})
    (found,) = reward.score([task], ["x"], [False])
    assert found.reward == 3 and found.correct
    own = {"uid": 6.0, "text": 4.0, "extra": 5.0}
    assert found.parts == {"accuracy": 1.0, "function": 3.0} | own


def test_an_asynchronous_function_waits_for_all_at_once(function):
    reward = function("slow_service")
    began = time.monotonic()
    assert [found.reward for found in score(reward, *"abcdefgh")] == [1] * 8
    assert time.monotonic() - began < 8


def test_its_process_lives_on_and_may_print(function):
    reward = function("counts")
    (first,), (second,) = score(reward, "a"), score(reward, "b")
    assert (first.reward, second.reward) == (1, 2)
    assert first.parts["pid"] == second.parts["pid"] and not second.correct


def test_a_value_that_is_no_reward_costs_its_own_response(function):
    reward = function("mixed")
    found = score(reward, *"abcdefghij")
    assert [one.reward for one in found] == [1, 1, 0, 0, 0, 0, 0, 0, 0, -2]
    assert [one.correct for one in found] == [True, True] + [False] * 7 + [True]
    assert [one.problem is None for one in found] == [True, True] + [False] * 7 + [True]
    assert sum(reward.problems.values()) == 7


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "reward is nan"),
        ("1", "'1', not a number"),
        ({"accuracy": 1}, "without 'reward'"),
        (None, "not a number"),
        ({"reward": 1, "accuracy": 2}, "accuracy 2.0 is not"),
        ({"reward": 1, "format": 1}, "a part called format"),
        ([1], "TypeError"),
        (10**400, "OverflowError"),
    ],
)
def test_the_reason_says_what_is_wrong_with_a_value(value, words):
    assert words in function_worker.score(value)["problem"]


def test_a_call_that_fails_costs_its_batch_and_the_next_one_works(function, caplog):
    reward = function("does", function_timeout_s=1.0)
    for what in ("hang", "die", "short", "dict", "set", "raise"):
        assert all(found.problem is not None for found in score(reward, what, "x"))
        fine = score(reward, "fine", "x")
        assert [(found.reward, found.problem) for found in fine] == [(1, None)] * 2
    assert sum(reward.problems.values()) == 12
    for words in (
        "function_timeout_s = 1 s",
        "process that judged it died",
        "returned 1 rewards for 2 responses",
        "it returned a dict, not a list",
        "the service is down",
    ):
        assert words in caplog.text
    assert restarts(reward) == 2


def test_a_function_that_always_fails_stops_the_run(function):
    reward = function("does")
    for _ in range(2):
        score(reward, "raise")
    with pytest.raises(
        ValueError,
        match=(
            "3 calls in a row gave no response a reward; the last one: RuntimeError: the service is"
            " down"
        ),
    ):
        score(reward, "raise")


def test_a_few_single_responses_that_fail_do_not_stop_the_run(function):
    """Responses are judged as they end, so a call may be of one alone. Six were the largest call
    here: 18 failures in a row stop the run, not three."""
    reward = function("does")
    score(reward, *["fine"] * 6)
    for _ in range(17):
        score(reward, "raise")
    with pytest.raises(ValueError, match="18 calls in a row gave no response a reward"):
        score(reward, "raise")


def test_what_fails_is_asked_again_alone(function):
    """Two tries: the first call has all three, the second those that failed, and then it ends."""
    one, two, three = score(function("recovers", num_tries=2), "1", "22", "333")
    assert [found.reward for found in (one, two, three)] == [1, 2, 0]
    assert [found.parts["verifier_tries"] for found in (one, two, three)] == [1, 2, 2]
    assert (one.problem, two.problem) == (None, None) and "not a number" in three.problem
    once = score(function("recovers"), "1", "22")
    assert once[1].problem is not None and "verifier_tries" not in once[0].parts


def test_the_third_try_waits(function):
    began = time.monotonic()
    (found,) = score(function("recovers", num_tries=3), "333")
    assert (found.reward, found.problem) == (3, None) and time.monotonic() - began > 1


def test_tries_of_one_call_do_not_stop_the_run_sooner(function):
    reward = function("does", num_tries=2)
    for _ in range(2):
        score(reward, "raise")
    with pytest.raises(ValueError, match="6 calls in a row gave no response a reward"):
        score(reward, "raise")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", r"my_rewards.py has no 'none'"),
        ("value", "is no function"),
        ("one_argument", r"cannot be called as function\(tasks, responses\)"),
    ],
)
def test_a_wrong_name_or_signature_is_refused_at_the_start(function, name, message):
    with pytest.raises(ValueError, match=message):
        function(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": "nowhere.py:f"}, "nowhere.py: cannot be imported"),
        ({"function": "f"}, "write path.py:name"),
        (
            {"function": "os.path:join", "verifier": "math"},
            r"takes the place of reward\.verifier = math",
        ),
        (
            {"function": "os.path:join", "answer_pattern": "(a)"},
            r"is given whole responses; remove reward\.answer_pattern",
        ),
    ],
)
def test_a_bad_configuration_of_it_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reward = build_reward(config(**{"verifier": "auto", **changes}))
        reward.check([prompt()])


def test_a_trainer_with_many_open_files_still_gets_its_rewards(function):
    """``select`` takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    opened = [os.dup(0) for _ in range(1100)]
    try:
        assert [found.reward for found in score(function("right"), "4", "5")] == [1, 0]
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
