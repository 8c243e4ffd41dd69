"""Hostile responses, scored through ``build_reward`` as the trainer does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.trials.place import Case, Place
from tests.trials.verdicts import Ends, Outcome

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
    """Scores must come within the limit.

    ``rewards``: what they must be. ``problems``: how many responses must count as not judged.
    """

    def play(place: Place) -> Outcome:
        settings = [item.replace("{folder}", str(place.folder)) for item in overrides]
        request = {"overrides": settings, "answer": answer, "responses": list(responses), **more}
        outcome = place.score(request)
        if outcome.code:
            return outcome
        return outcome.noting(*compared(outcome.text, rewards, within_s, problems))

    return Case(name, "rewards", title, play, (Ends(),), "direct", limit_s=within_s + 30)


def compared(
    text: str, rewards: Sequence[float] | None, within_s: float, problems: int | None
) -> tuple[list[str], list[str]]:
    """What is wrong and what is poor about the scores on the screen."""
    match = SCORES.search(text)
    if match is None:
        return ["no scores"], []
    report: Mapping[str, Any] = json.loads(match[1])
    seconds, scores = report["seconds"], report["scores"]
    wrong = []
    if seconds > within_s:
        took = f"{seconds:.1f} s for {len(scores)} responses"
        wrong.append(f"{took}, the limit allows {within_s:.1f} s")
    found = [score["reward"] for score in scores]
    if rewards is not None and found != list(rewards):
        wrong.append(f"rewards {found[:4]}, expected {list(rewards)[:4]}")
    counted = sum(score["parts"].get("verifier_problem", 0) > 0 for score in scores)
    poor = []
    if problems is not None and counted < problems:
        poor.append(f"{counted} responses counted as not judged, expected {problems}")
    return wrong, poor


LETTERS = [["a", 40], "b"]
EXACT = ["reward.verifier=exact", f"reward.timeout_s={TIMEOUT_S}"]


def by_answer(pattern: str) -> list[str]:
    return [*EXACT, f"reward.answer_pattern='{pattern}'"]


def by_format(pattern: str) -> list[str]:
    return [*EXACT, "reward.format_weight=0.5", f"reward.format_pattern='{pattern}'"]


def patterns() -> list[Case]:
    """Regular expressions of users that backtrack, and responses that make them."""
    steps = [["<step>a", 400], "</ste"]
    think = [["<think>a</think> ", 200], "<answer>b"]
    blanks = ["<answer>", [" \n", 400], "x"]
    return [
        scored(
            "regex_answer",
            "nested blanks in the answer pattern",
            by_answer(r"<answer>((?:\s*.*\s*)*)</answer>"),
            [blanks],
        ),
        scored(
            "regex_think",
            "nested groups in the format pattern",
            by_format(r"(<think>.*</think>\s*)+(<answer>.*</answer>\s*)+"),
            [think],
        ),
        scored("regex_letters", "((a+)+)$", by_answer(r"((a+)+)$"), [LETTERS]),
        scored("regex_steps", "steps", by_format(r"(\s*<step>.*</step>\s*)*"), [steps]),
    ]


def r1_patterns() -> list[Case]:
    """The pattern of R1, which is good, and what it is for; many responses at once."""
    r1 = "^<think>.*</think>\\s*<answer>.*</answer>$"
    repeats = [["<think></think><answer></answer>", 125], "x"]
    return [
        scored("regex_r1_4k", "the plain R1 pattern, 4000 letters", by_format(r1), [repeats]),
        scored(
            "regex_r1_100k",
            "the plain R1 pattern, 100000 letters",
            by_format(r1),
            [[["<think></think>", 7000]]],
        ),
        scored(
            "regex_good",
            "the plain R1 pattern on what it is for",
            by_format(r1),
            ["<think>a</think>\n<answer>7</answer>"],
            rewards=[0.5],
        ),
        scored(
            "regex_capture",
            "the last match counts",
            by_answer(r"<a>(.*?)</a>"),
            ["<a>5</a> no, <a>7</a>", "7"],
            rewards=[1.0, 0.0],
        ),
        scored(
            "regex_many",
            "16 hostile responses",
            by_answer(r"((a+)+)$"),
            [LETTERS] * 16,
            within_s=16 * (TIMEOUT_S + SLACK_S) / 2 + START_S,
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
    cases = []
    for name, text in hostile.items():
        cases.append(scored(f"math_{name}", name, MATH, [text], rewards=[0.0]))
    for name, repeated in long.items():
        cases.append(scored(f"math_{name}", name.replace("_", " "), MATH, [repeated]))
    right = [r"so \boxed{7}", r"\boxed{\frac{14}{2}}", r"\boxed{8}", ""]
    sixteen = [r"\boxed{9^{9^{9^9}}}"] * 16
    few = 16 * (1 + SLACK_S) / 2 + START_S
    return [
        *cases,
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
        scored(
            "math_nul",
            "NUL, surrogates and escapes",
            MATH,
            ["\x00\x1b[2J\\boxed{7}", "\ufffd\\boxed{7}"],
        ),
    ]


def cases() -> list[Case]:
    return [*patterns(), *r1_patterns(), *mathematics()]
