"""Patterns: RE2 finds what Python finds, and those that RE2 cannot take are stopped in time."""

from __future__ import annotations

import random
import re
import time

import pytest

from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.patterns import ResponsePattern, linear
from tests.unit.rewards.cases import config, hostile_texts, prompt

# Plain R1 pattern on a response that repeats it: 4.4 s for one response with Python's re.
R1 = r"<think>.*</think>\s*<answer>.*</answer>"
R1_4K = "<think>a</think><answer>b</answer> x" * 4000
# Each did not end within 12 s on the response beside it.
KILLERS = [
    ("answer_pattern", r"<answer>((?:\s*.*\s*)*)</answer>", "<answer>" + "\n" * 40),
    (
        "format_pattern",
        r"(<think>.*</think>\s*)+(<answer>.*</answer>\s*)+",
        "<think>a</think><answer>b</answer>" * 80 + "x",
    ),
    ("answer_pattern", r"((a+)+)$", "a" * 40 + "!"),
    ("format_pattern", r"(\s*<step>.*</step>\s*)*", "<step>a</step>" * 200 + "x"),
    ("format_pattern", r"((a|aa)+\b)*", "a" * 60 + "!"),
]


def test_the_plain_r1_pattern_is_matched_in_one_pass():
    pattern = ResponsePattern(R1)
    began = time.process_time()
    assert not pattern.matches_all(R1_4K) and pattern.matches_all(R1_4K[:-2])
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(("key", "pattern", "response"), KILLERS)
def test_no_pattern_holds_up_a_step(key, pattern, response):
    reward = build_reward(config(**{key: pattern}, timeout_s=0.5))
    reward.score([prompt()], ["4"], [False])
    began = time.monotonic()
    hostile, good = reward.score([prompt()] * 2, [response, "4"], [False] * 2)
    assert time.monotonic() - began < 30
    assert hostile.reward == 0 and good.correct == (key == "format_pattern")
    reward.close()


def test_a_format_that_takes_too_long_does_not_lose_the_answer():
    reward = build_reward(
        config(
            format_pattern=r"(?=(a+)+$).*|4", format_weight=1.0, timeout_s=0.3, on_problem="zero"
        )
    )
    response = "a" * 40 + "!"
    (score,) = reward.score([prompt(response)], [response], [False])
    assert score.parts == {"accuracy": 1.0, "format": 0.0, "verifier_problem": 1.0}
    assert score.reward == 1 and score.problem is None, "it counts, as far as it was judged"
    reward.close()


ATOMS = (
    *r"a b . \s \d \w \S \W [ab] [^a] [\s\d] [^\W1] (a) (a|b) (?:ab|a) (.*) (.*?) ^ $ \Z".split(),
    *r"(a+) (?:a|b)+ a{2} a{1,2}? \.".split(),
    "\u00e9",
    *r"(b)? (a*)* \b (?=a) (?P<x>a) -".split(),
)
LETTERS = "aabb1 \n.-\u00e9\u0660\u00a0\x1c\u2028_\U0001f600"


def test_re2_finds_what_python_finds():
    """Random patterns on random texts; what is said to be shared is shared, and most of it is."""
    draw = random.Random(0)
    searched = whole = found = 0
    for _ in range(400):
        pattern = "".join(draw.choices(ATOMS, k=draw.randrange(1, 6)))
        try:
            compiled = re.compile(f"({pattern})", re.DOTALL | re.ASCII)
        except re.error:
            continue
        mine = ResponsePattern(f"({pattern})")
        searched += mine._search is not None
        whole += mine._whole is not None
        for _ in range(20):
            text = "".join(draw.choices(LETTERS, k=draw.randrange(12)))
            matches = list(compiled.finditer(text))
            expected = matches[-1].group(1) if matches else None
            found += expected is not None
            assert mine.last_group(text) == expected, (pattern, text)
            assert mine.matches_all(text) == (compiled.fullmatch(text) is not None), (pattern, text)
    assert searched > 100 and whole > 150 and found > 1000


@pytest.mark.parametrize(
    "pattern",
    [
        *r"(a)\1 (?=a)b (?i)a (?m)^a (?>a*)a a*+ (?i:a) a$".split(),
        *("\ud800", "a{2000}", "a{,2}", "[[:alpha:]]"),
    ],
)
def test_what_re2_has_otherwise_stays_with_python(pattern):
    assert linear(pattern) is None


def test_hostile_texts_match_alike():
    for pattern in (R1, r"<answer>(.*?)</answer>", r"\s*(\d+)\s*", r"(\w+)\W*"):
        compiled, mine = re.compile(pattern, re.DOTALL | re.ASCII), ResponsePattern(pattern)
        assert mine._whole is not None
        for text in hostile_texts(150):
            text = re.sub("[\ud800-\udfff]", "\ufffd", text)[:2000]
            assert mine.matches_all(text) == (compiled.fullmatch(text) is not None)
            if compiled.groups:
                matches = list(compiled.finditer(text))
                assert mine.last_group(text) == (matches[-1].group(1) if matches else None)
