"""Programs as answers, reward functions of users, numbers and generated tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.trials.place import Case, Place
from tests.trials.reward_cases import NUMBER, SLACK_S, START_S, TIMEOUT_S, compared, scored
from tests.trials.verdicts import Ends, Outcome, Refused

CODE = """def add(a, b):
    {body}
"""
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"


def program(body: str) -> str:
    return "```python\n" + CODE.format(body=body) + "```"


def code() -> list[Case]:
    """Programs judged by unit tests in a sandbox."""
    settings = ["reward.verifier=code", f"reward.timeout_s={TIMEOUT_S}"]

    def judged(name: str, title: str, body: str, reward: float) -> Case:
        case = scored(
            f"code_{name}",
            title,
            settings,
            [program(body)],
            answer=TESTS,
            rewards=[reward],
        )
        return replace(case, needs=("bwrap",))

    return [
        judged("right", "a right program", "return a + b", 1.0),
        judged("wrong", "a wrong program", "return a - b", 0.0),
        judged("loop", "a loop without end", "while True: pass", 0.0),
        judged("memory", "all memory", "x = [0] * (10**11); return a + b", 0.0),
        judged("fork", "a fork bomb", "import os\n    while True: os.fork()", 0.0),
        judged("exit", "leaves before the tests", "import os; os._exit(0)", 0.0),
        judged("sys_exit", "leaves by SystemExit", "raise SystemExit(0)", 0.0),
        judged(
            "network",
            "asks the network",
            "import socket; socket.create_connection(('1.1.1.1', 53), 2); return a + b",
            0.0,
        ),
        judged("print", "writes 100 MB", "print('x' * 10**8); return a + b", 1.0),
        judged("syntax", "no Python", "return a +* b", 0.0),
        Case(
            "code_writes",
            "rewards",
            "writes into the user's files",
            code_writes,
            (Ends(),),
            "direct",
            needs=("bwrap",),
        ),
    ]


def code_writes(place: Place) -> Outcome:
    proof = place.folder / "written"
    body = f"open({str(proof)!r}, 'w').write('x'); return a + b"
    settings = ["reward.verifier=code", f"reward.timeout_s={TIMEOUT_S}"]
    outcome = place.score({"overrides": settings, "answer": TESTS, "responses": [program(body)]})
    return outcome.noting(["the program wrote outside of its sandbox"] if proof.exists() else [])


OWN = """
import asyncio
import time


def length(prompt, response):
    return float(len(response))


def lengths(prompts, responses):
    return [float(len(response)) for response in responses]


def slow(prompts, responses):
    time.sleep(3600)


def raises(prompts, responses):
    raise RuntimeError("no judge today")


def nan(prompts, responses):
    return [float("nan")] * len(responses)


def short(prompts, responses):
    return [1.0]


def texts(prompts, responses):
    return ["good"] * len(responses)


async def later(prompts, responses):
    await asyncio.sleep(0.05)
    return [1.0] * len(responses)
"""


def own(
    name: str,
    title: str,
    function: str,
    expected: tuple[Any, ...],
    rewards: Sequence[float] | None = None,
) -> Case:
    """``reward.function`` on three responses."""

    def play(place: Place) -> Outcome:
        file = place.folder / "mine.py"
        file.write_text(OWN)
        settings = [f"reward.function={file}:{function}", f"reward.function_timeout_s={TIMEOUT_S}"]
        responses = ["a", "bb", "ccc"]
        outcome = place.score({"overrides": settings, "answer": "7", "responses": responses})
        if outcome.code:
            return outcome
        return outcome.noting(*compared(outcome.text, rewards, TIMEOUT_S + SLACK_S + START_S, None))

    return Case(name, "rewards", title, play, expected, "direct")


def functions() -> list[Case]:
    """Reward functions of the user's."""
    counted = (
        Ends(("RuntimeError|no judge today|could not be judged|failed",)),
        Refused((r"reward\.function",)),
    )
    odd = (
        Refused((r"reward\.function",), before=""),
        Ends((r"reward\.function|could not be judged",)),
    )
    return [
        own("own_lengths", "a function of a file, batched", "lengths", (Ends(),), [1.0, 2.0, 3.0]),
        own("own_async", "an asynchronous function", "later", (Ends(),), [1.0, 1.0, 1.0]),
        own(
            "own_missing",
            "a name that is not in the file",
            "lenghts",
            (Refused((r"reward\.function", "lenghts")),),
        ),
        own(
            "own_slow",
            "a function that sleeps for an hour",
            "slow",
            (Ends(("time|within|limit",)), Refused((r"reward\.function",))),
        ),
        own("own_raises", "a function that raises", "raises", counted),
        own("own_nan", "a function that returns nan", "nan", odd),
        own("own_short", "one score for three responses", "short", odd),
        own("own_texts", "texts instead of numbers", "texts", odd),
        scored_refused(
            "own_nofile",
            "a file that does not exist",
            ["reward.function=/nowhere/mine.py:f"],
            r"reward\.function",
            "/nowhere/mine.py",
        ),
        scored_refused(
            "own_nocolon",
            "no name behind the file",
            ["reward.function=mine.py"],
            r"reward\.function",
            ":",
        ),
    ]


def scored_refused(
    name: str, title: str, overrides: Sequence[str], *says: str, answer: Any = "7"
) -> Case:
    def play(place: Place) -> Outcome:
        return place.score({"overrides": list(overrides), "answer": answer, "responses": ["a"]})

    return Case(name, "rewards", title, play, (Refused(says),), "direct")


def numbers() -> list[Case]:
    """Long and odd numbers, a long text."""
    digits = [["7", 500000]]
    return [
        scored("number_digits", "500000 digits", NUMBER, [digits], rewards=[0.0], within_s=5),
        scored("number_commas", "500000 groups of commas", NUMBER, [[["1,", 500000]]], within_s=5),
        scored("number_exponent", "1e999999999", NUMBER, ["1e999999999", "7e0"], within_s=5),
        scored(
            "number_good",
            "seven in four forms",
            NUMBER,
            ["7", "so 7.0", "$7", "8"],
            rewards=[1.0, 1.0, 1.0, 0.0],
            within_s=5,
        ),
        scored(
            "exact_10mb",
            "10 MB for verifier exact",
            ["reward.verifier=exact"],
            [[["x", 10_000_000]]],
            rewards=[0.0],
            within_s=5,
        ),
    ]


def tasks() -> list[Case]:
    """Generated tasks, and expected answers that no verifier takes."""
    gym = ["reward.verifier=reasoning_gym"]
    entry = {
        "question": "",
        "answer": "7",
        "metadata": {"source_dataset": "countdown", "numbers": [1, 6], "target": 7},
    }
    countdown = {"data_source": "reasoning_gym:countdown", "extra": entry}
    return [
        scored(
            "gym_code",
            "code as an answer",
            gym,
            ["__import__('os').system('true')", "6 + 1"],
            rewards=[0.0, 1.0],
            within_s=20,
            **countdown,
        ),
        scored(
            "gym_power",
            "a power as an answer",
            gym,
            ["9**9**9", ["(" * 50, "7"]],
            within_s=20,
            **countdown,
        ),
        scored(
            "gym_division",
            "a division by zero",
            gym,
            ["6/(1-1)"],
            rewards=[0.0],
            within_s=20,
            **countdown,
        ),
        scored_refused(
            "number_word", "an expected answer that is no number", NUMBER, "seven", answer="seven"
        ),
        scored_refused(
            "gym_unknown",
            "a task without a verifier",
            ["reward.verifier=reasoning_gym"],
            "data source|reward.verifier",
        ),
    ]


def cases() -> list[Case]:
    return [*code(), *functions(), *numbers(), *tasks()]
