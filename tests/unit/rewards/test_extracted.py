"""The answer that a verifier has judged: what responses vote with in maj@n."""

from __future__ import annotations

from decimal import Decimal

import pytest

from megatron_rl.rewards.base import Verdict
from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.number import plain
from tests.unit.rewards.cases import config, prompt
from tests.unit.rewards.test_rewards import entry


def extracted(answers: list[str], expected: str = "7", **changes) -> list[str | None]:
    """What a reward with these settings says of responses to one prompt."""
    reward = build_reward(config(timeout_s=20.0, **changes))
    one = prompt(expected)
    reward.check([one])
    scores = reward.score([one] * len(answers), answers, [False] * len(answers))
    reward.close()
    return [score.extracted for score in scores]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("7", "7"),
        ("7.00", "7"),
        ("-0.50", "-0.5"),
        ("-0", "0"),
        ("0.000", "0"),
        ("100", "100"),
        ("1e3", "1000"),
        ("12e-2", "0.12"),
        ("1" * 40 + ".10", "1" * 40 + ".1"),  # more digits than a context keeps
    ],
)
def test_equal_numbers_are_one_text(number, text):
    assert plain(Decimal(number)) == text


def test_numbers_and_exact_texts():
    answers = ["it is 7.0", "so $1,234.50", "none"]
    assert extracted(answers, verifier="number") == ["7", "1234.5", ""]
    assert extracted([" 7\n", "seven"]) == ["7", "seven"]


def test_a_worker_passes_on_what_the_pattern_cuts_out():
    pattern = {"answer_pattern": "<a>(.*?)</a>"}
    answers = ["1 <a> 7 </a>", "no answer"]
    assert extracted(answers, **pattern) == ["7", ""]


def test_math_answers_are_normalized_texts():
    answers = [r"\boxed{0.5}", r"\boxed{ \frac{1}{2} }", r"\boxed{x = 3}", "nothing"]
    assert extracted(answers, "0.5", verifier="math") == [r"\frac{1}{2}"] * 2 + ["x=3", ""]


def test_generated_tasks_vote_with_what_their_scorer_is_given():
    task = entry("chain_sum")
    reward = build_reward(config(verifier="reasoning_gym", timeout_s=20.0))
    reward.check([task])
    (score,) = reward.score([task], [f" {task.answer}\n"], [False])
    reward.close()
    assert (score.correct, score.extracted) == (True, task.answer)


def test_programs_name_no_answer():
    tests = '[{"input": "", "output": "7\\n"}]'
    assert extracted(["print(7)"], tests, verifier="code") == [None]


def test_a_long_answer_is_cut_but_stays_apart_from_others():
    texts = ["x" * 500 + end for end in "ab"]
    cut = [Verdict(0.0, extracted=text).extracted for text in texts]
    assert [len(text or "") for text in cut] == [128, 128]
    assert cut[0] != cut[1]
    assert Verdict(0.0, extracted=texts[0]).extracted == cut[0]
    assert Verdict(0.0, extracted="x" * 128).extracted == "x" * 128
