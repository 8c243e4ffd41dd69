"""Hostile texts through every verifier: each gets a verdict, in time, and the workers continue
judging."""

from __future__ import annotations

import time

import pytest

from megatron_rl.rewards import registry
from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.reasoning_gym import ARITHMETIC_ONLY, PREFIX
from megatron_rl.types import Prompt
from tests.unit.rewards.cases import config, hostile_texts

TIMEOUT_S = 2.0
CODE_TIMEOUT_S = (
    20.0  # each text is a process of its own: on a busy machine it takes seconds to start
)
FORMAT = r"(<think>.*</think>\s*)+(<answer>.*</answer>\s*)+"


def prompts_of(name: str) -> list[Prompt]:
    """Tasks of one verifier that its answers can be put to."""
    if name == "reasoning_gym":
        import reasoning_gym

        tasks = (
            "chain_sum",
            "spell_backward",
            "complex_arithmetic",
            "simple_equations",
            *ARITHMETIC_ONLY,
        )
        made = [(task, reasoning_gym.create_dataset(task, size=1, seed=1)[0]) for task in tasks]
        return [
            Prompt(f"{task}:1", (1,), str(entry["answer"]), PREFIX + task, entry)
            for task, entry in made
        ]
    answers = {"math": [r"\frac{1}{2}", "7", "(1, 2)"], "number": ["-1,234.5"], "exact": ["x"]}
    answers["choice"] = ["B", "fear", "7"]
    answers["code"] = ["assert f() == 1", '[{"input": "1", "output": "1"}]']
    return [
        Prompt(f"{name}:{row}", (1,), answer, name, {}) for row, answer in enumerate(answers[name])
    ]


def judged(name: str, texts: list[str], **changes) -> tuple[int, float]:
    """(responses that could not be judged, seconds). Every text gets a score; the right answer is
    still right afterwards."""
    reward = build_reward(
        config(
            verifier=name,
            timeout_s=CODE_TIMEOUT_S if name == "code" else TIMEOUT_S,
            step_timeout_s=600.0,
            num_workers=2,
            memory_gib=1.0,
            **changes,
        )
    )
    prompts = prompts_of(name)
    reward.check(prompts)
    rows = [prompts[row % len(prompts)] for row in range(len(texts))]
    reward.score(
        prompts, ["1"] * len(prompts), [False] * len(prompts)
    )  # the time of a start is no part of it
    began = time.monotonic()
    scores = reward.score(rows, texts, [False] * len(texts))
    seconds = time.monotonic() - began
    assert len(scores) == len(texts)
    assert all(0 <= score.reward <= 2 for score in scores)
    if name != "code":
        (right,) = reward.score(
            prompts[:1],
            [f"<answer>{prompts[0].answer}</answer>" if changes else prompts[0].answer],
            [False],
        )
        assert right.correct
    reward.close()
    return sum(score.problem is not None for score in scores), seconds


# Each text that is judged as code is a process of its own; what one may do to it: test_code_*.py.
CODE = pytest.param("code", marks=pytest.mark.full)


@pytest.mark.parametrize("name", ["exact", "number", "math", "choice", "reasoning_gym", CODE])
def test_hostile_texts(name):
    number = {"math": 60, "choice": 60, "code": 8}.get(name, 200)
    problems, seconds = judged(name, hostile_texts(number))
    assert seconds < 60 + problems * (TIMEOUT_S + 1.5)
    if name in ("exact", "number", "code"):
        assert problems == 0


def test_hostile_texts_against_patterns():
    problems, seconds = judged(
        "exact",
        hostile_texts(40),
        format_pattern=FORMAT,
        answer_pattern=r"<answer>((?:\s*.*\s*)*)</answer>",
    )
    assert seconds < 60 + problems * (TIMEOUT_S + 1.5)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["exact", "number", "math", "choice", "reasoning_gym", "code"])
def test_ten_thousand_hostile_texts(name):
    """10 000 texts through each verifier; through ``code``, where each is a process, 2000."""
    texts = hostile_texts(2000 if name == "code" else 10_000, seed=1)
    began = time.monotonic()
    problems = 0
    for first in range(0, len(texts), 500):
        problems += judged(name, texts[first : first + 500])[0]
    assert time.monotonic() - began < 900 + problems * (TIMEOUT_S + 1.5)


def test_every_verifier_is_tried_here():
    own = {
        name
        for name, verifier in registry._classes.items()
        if verifier.__module__.startswith("megatron_rl.rewards")
    }
    assert own == {"exact", "number", "math", "choice", "reasoning_gym", "code"}
