"""Hostile responses, scored through ``build_reward`` as the trainer does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome, Refused

TIMEOUT_S = 3.0
SLACK_S = 1.5  # a worker that is killed and started anew
SCORES = re.compile(r"^scores (\{.*\})$", re.MULTILINE)
MATH = ["reward.verifier=math", f"reward.timeout_s={TIMEOUT_S}"]
NUMBER = ["reward.verifier=number", f"reward.timeout_s={TIMEOUT_S}"]
START_S = 12.0  # the first worker of a launch imports its library


def scored(
    name: str,
    title: str,
    overrides: Sequence[str],
    responses: Sequence[Any],
    *,
    answer: Any = "7",
    rewards: Sequence[float] | None = None,
    within_s: float = TIMEOUT_S + SLACK_S + START_S,
    problems: int | None = None,
    **more: Any,
) -> Case:
    """Scores must come within the limit. ``rewards``: what they must be; ``problems``: how many
    responses must be counted as not judged."""

    def play(place: Place) -> Outcome:
        settings = [item.replace("{folder}", str(place.folder)) for item in overrides]
        request = {"overrides": settings, "answer": answer, "responses": list(responses), **more}
        outcome = place.score(request)
        if outcome.code:
            return outcome
        return outcome.noting(*compared(outcome.text, rewards, within_s, problems))

    return Case(name, "rewards", title, play, (Ends(),), "direct", limit_s=within_s + 30)


def compared(text: str, rewards: Sequence[float] | None, within_s: float, problems: int | None) -> tuple[list[str], list[str]]:
    """What is wrong and what is poor about the scores on the screen."""
    match = SCORES.search(text)
    if match is None:
        return ["no scores"], []
    report: Mapping[str, Any] = json.loads(match[1])
    seconds, scores = report["seconds"], report["scores"]
    wrong = []
    if seconds > within_s:
        wrong.append(f"{seconds:.1f} s for {len(scores)} responses, the limit allows {within_s:.1f} s")
    found = [score["reward"] for score in scores]
    if rewards is not None and found != list(rewards):
        wrong.append(f"rewards {found[:4]}, expected {list(rewards)[:4]}")
    counted = sum(score["parts"].get("verifier_problem", 0) > 0 for score in scores)
    poor = []
    if problems is not None and counted < problems:
        poor.append(f"{counted} responses counted as not judged, expected {problems}")
    return wrong, poor


def patterns() -> list[Case]:
    """Regular expressions of users that backtrack, and responses that make them."""
    steps = [["<step>a", 400], "</ste"]
    think = [["<think>a</think> ", 200], "<answer>b"]
    blanks = ["<answer>", [" \n", 400], "x"]
    letters = [["a", 40], "b"]
    limit = TIMEOUT_S + SLACK_S + START_S

    def answer(pattern: str) -> list[str]:
        return ["reward.verifier=exact", f"reward.timeout_s={TIMEOUT_S}", f"reward.answer_pattern='{pattern}'"]

    def form(pattern: str) -> list[str]:
        kept = ["reward.verifier=exact", f"reward.timeout_s={TIMEOUT_S}", "reward.format_weight=0.5"]
        return [*kept, f"reward.format_pattern='{pattern}'"]

    r1 = "^<think>.*</think>\\s*<answer>.*</answer>$"
    repeats = [["<think></think><answer></answer>", 125], "x"]
    return [
        scored(
            "regex_answer", "nested blanks in the answer pattern", answer(r"<answer>((?:\s*.*\s*)*)</answer>"), [blanks], within_s=limit
        ),
        scored(
            "regex_think",
            "nested groups in the format pattern",
            form(r"(<think>.*</think>\s*)+(<answer>.*</answer>\s*)+"),
            [think],
            within_s=limit,
        ),
        scored("regex_letters", "((a+)+)$", answer(r"((a+)+)$"), [letters], within_s=limit),
        scored("regex_steps", "steps", form(r"(\s*<step>.*</step>\s*)*"), [steps], within_s=limit),
        scored("regex_r1_4k", "the plain R1 pattern, 4000 letters", form(r1), [repeats], within_s=limit),
        scored("regex_r1_100k", "the plain R1 pattern, 100000 letters", form(r1), [[["<think></think>", 7000]]], within_s=limit),
        scored(
            "regex_good",
            "the plain R1 pattern on what it is for",
            form(r1),
            ["<think>a</think>\n<answer>7</answer>"],
            rewards=[0.5],
            within_s=limit,
        ),
        scored(
            "regex_capture",
            "the last match counts",
            answer(r"<a>(.*?)</a>"),
            ["<a>5</a> no, <a>7</a>", "7"],
            rewards=[1.0, 0.0],
            within_s=limit,
        ),
        scored(
            "regex_many", "16 hostile responses", answer(r"((a+)+)$"), [letters] * 16, within_s=16 * (TIMEOUT_S + SLACK_S) / 2 + START_S
        ),
    ]


def mathematics() -> list[Case]:
    r"""What a collapsed or clever policy writes where \boxed{7} is expected."""
    hostile = {
        "tower": r"\boxed{9^{9^{9^9}}}",
        "power": r"\boxed{9**9**9}",
        "factorials": r"\boxed{((((99!)!)!)!)!}",
        "binomial": r"\boxed{\binom{10^{9}}{5\cdot10^{8}}}",
        "integral": r"\boxed{\int_0^1 \int_0^1 e^{x^{2} y^{3}} \sin(x^{y}) \, dx \, dy}",
        "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^n}}",
    }
    long = {
        "braces": ["\\boxed{", ["{", 3000], "7", ["}", 3000], "}"],
        "fractions": ["\\boxed{", ["\\frac{1}{", 300], "7", ["}", 300], "}"],
        "brackets": ["\\boxed{", ["(", 5000], "7", [")", 5000], "}"],
        "set": ["\\boxed{\\{", ["1,", 20000], "7\\}}"],
        "digits": ["\\boxed{", ["7", 200000], "}"],
        "boxes_5k": [["\\boxed{", 5000]],
        "boxes_100k": [["\\boxed{", 100000]],
        "text_1mb": [["the answer is seven. ", 50000]],
        "minus": ["\\boxed{", ["-", 50000], "7}"],
    }
    found = [scored(f"math_{name}", name, MATH, [text], rewards=[0.0]) for name, text in hostile.items()]
    found += [scored(f"math_{name}", name.replace("_", " "), MATH, [parts]) for name, parts in long.items()]
    right = [r"so \boxed{7}", r"\boxed{\frac{14}{2}}", r"\boxed{8}", ""]
    sixteen = [r"\boxed{9^{9^{9^9}}}"] * 16
    few = 16 * (1 + SLACK_S) / 2 + START_S
    return [
        *found,
        scored("math_good", "right and wrong answers", MATH, right, rewards=[1.0, 1.0, 0.0, 0.0]),
        scored(
            "math_sixteen",
            "16 hostile answers at 1 s, 2 workers",
            ["reward.verifier=math", "reward.timeout_s=1"],
            sixteen,
            within_s=few,
            problems=16,
        ),
        scored("math_counted", "a time-out is counted", MATH, [r"\boxed{9^{9^{9^9}}}"], problems=1),
        scored("math_nul", "NUL, surrogates and escapes", MATH, ["\x00\x1b[2J\\boxed{7}", "\ufffd\\boxed{7}"]),
    ]


CODE = """def add(a, b):
    {body}
"""
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"


def program(body: str) -> str:
    return "```python\n" + CODE.format(body=body) + "```"


def code() -> list[Case]:
    """Programs judged by unit tests in a sandbox."""
    settings = ["reward.verifier=code", f"reward.timeout_s={TIMEOUT_S}"]
    limit = TIMEOUT_S + SLACK_S + START_S

    def judged(name: str, title: str, body: str, reward: float) -> Case:
        case = scored(f"code_{name}", title, settings, [program(body)], answer=TESTS, rewards=[reward], within_s=limit)
        return Case(case.name, case.group, case.title, case.play, case.expected, case.how, case.limit_s, needs=("bwrap",))

    return [
        judged("right", "a right program", "return a + b", 1.0),
        judged("wrong", "a wrong program", "return a - b", 0.0),
        judged("loop", "a loop without end", "while True: pass", 0.0),
        judged("memory", "all memory", "x = [0] * (10**11); return a + b", 0.0),
        judged("fork", "a fork bomb", "import os\n    while True: os.fork()", 0.0),
        judged("exit", "leaves before the tests", "import os; os._exit(0)", 0.0),
        judged("sys_exit", "leaves by SystemExit", "raise SystemExit(0)", 0.0),
        judged("network", "asks the network", "import socket; socket.create_connection(('1.1.1.1', 53), 2); return a + b", 0.0),
        judged("print", "writes 100 MB", "print('x' * 10**8); return a + b", 1.0),
        judged("syntax", "no Python", "return a +* b", 0.0),
        Case("code_writes", "rewards", "writes into the user's files", code_writes, (Ends(),), "direct", needs=("bwrap",)),
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


def own(name: str, title: str, function: str, expected: tuple[Any, ...], rewards: Sequence[float] | None = None) -> Case:
    """``reward.function`` on three responses."""

    def play(place: Place) -> Outcome:
        file = place.folder / "mine.py"
        file.write_text(OWN)
        settings = [f"reward.function={file}:{function}", f"reward.function_timeout_s={TIMEOUT_S}"]
        outcome = place.score({"overrides": settings, "answer": "7", "responses": ["a", "bb", "ccc"]})
        if outcome.code:
            return outcome
        return outcome.noting(*compared(outcome.text, rewards, TIMEOUT_S + SLACK_S + START_S, None))

    return Case(name, "rewards", title, play, expected, "direct")


def functions() -> list[Case]:
    """Reward functions of the user's."""
    counted = (Ends(("RuntimeError|no judge today|could not be judged|failed",)), Refused((r"reward\.function",)))
    odd = (Refused((r"reward\.function",), before=""), Ends((r"reward\.function|could not be judged",)))
    return [
        own("own_lengths", "a function of a file, batched", "lengths", (Ends(),), [1.0, 2.0, 3.0]),
        own("own_async", "an asynchronous function", "later", (Ends(),), [1.0, 1.0, 1.0]),
        own("own_missing", "a name that is not in the file", "lenghts", (Refused((r"reward\.function", "lenghts")),)),
        own("own_slow", "a function that sleeps for an hour", "slow", (Ends(("time|within|limit",)), Refused((r"reward\.function",)))),
        own("own_raises", "a function that raises", "raises", counted),
        own("own_nan", "a function that returns nan", "nan", odd),
        own("own_short", "one score for three responses", "short", odd),
        own("own_texts", "texts instead of numbers", "texts", odd),
        scored_refused(
            "own_nofile", "a file that does not exist", ["reward.function=/nowhere/mine.py:f"], r"reward\.function", "/nowhere/mine.py"
        ),
        scored_refused("own_nocolon", "no name behind the file", ["reward.function=mine.py"], r"reward\.function", ":"),
    ]


def scored_refused(name: str, title: str, overrides: Sequence[str], *says: str, answer: Any = "7") -> Case:
    def play(place: Place) -> Outcome:
        return place.score({"overrides": list(overrides), "answer": answer, "responses": ["a"]})

    return Case(name, "rewards", title, play, (Refused(says),), "direct")


def numbers_and_tasks() -> list[Case]:
    digits = [["7", 500000]]
    gym = ["reward.verifier=reasoning_gym"]
    entry = {"question": "", "answer": "7", "metadata": {"source_dataset": "countdown", "numbers": [1, 6], "target": 7}}
    countdown = {"data_source": "reasoning_gym:countdown", "extra": entry}
    return [
        scored("number_digits", "500000 digits", NUMBER, [digits], rewards=[0.0], within_s=5),
        scored("number_commas", "500000 groups of commas", NUMBER, [[["1,", 500000]]], within_s=5),
        scored("number_exponent", "1e999999999", NUMBER, ["1e999999999", "7e0"], within_s=5),
        scored("number_good", "seven in four forms", NUMBER, ["7", "so 7.0", "$7", "8"], rewards=[1.0, 1.0, 1.0, 0.0], within_s=5),
        scored("exact_10mb", "10 MB for verifier exact", ["reward.verifier=exact"], [[["x", 10_000_000]]], rewards=[0.0], within_s=5),
        scored(
            "gym_code", "code as an answer", gym, ["__import__('os').system('true')", "6 + 1"], rewards=[0.0, 1.0], within_s=20, **countdown
        ),
        scored("gym_power", "a power as an answer", gym, ["9**9**9", ["(" * 50, "7"]], within_s=20, **countdown),
        scored("gym_division", "a division by zero", gym, ["6/(1-1)"], rewards=[0.0], within_s=20, **countdown),
        scored_refused("number_word", "an expected answer that is no number", NUMBER, "seven", answer="seven"),
        scored_refused("gym_unknown", "a task without a verifier", ["reward.verifier=reasoning_gym"], "data source|reward.verifier"),
    ]


def cases() -> list[Case]:
    return [*patterns(), *mathematics(), *code(), *functions(), *numbers_and_tasks()]
