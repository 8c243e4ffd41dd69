"""Verifiers and their composition: what counts as right, what counts as wrong, what is refused."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from megatron_rl.rewards.base import Verdict, Verifier
from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.math_answers import last_boxed
from megatron_rl.rewards.number import last_number
from megatron_rl.rewards.reasoning_gym import REFUSED
from megatron_rl.rewards.registry import register_verifier
from megatron_rl.types import Prompt
from tests.unit.rewards.cases import accuracies, config, prompt


def test_exact_needs_no_worker():
    reward = build_reward(config())
    reward.check([prompt()])
    assert accuracies(reward, [prompt()], ["4"]) == [1]
    assert reward._pool is None


def test_exact():
    assert accuracies(
        build_reward(config()), [prompt("Ab c")] * 4, ["Ab c", " Ab c\n", "ab c", "Ab  c"]
    ) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("$1,234.50", "1234.5"),
        ("9-3", "3"),
        ("x = -3", "-3"),
        ("(2)-5", "5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("1e3", "1000"),
        ("5%", "5"),
        ("7.00", "7"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    found = last_number(text)
    assert (found is None) == (number is None) and (number is None or float(found) == float(number))


def test_number_compares_values_not_texts():
    reward = build_reward(config(verifier="number"))
    responses = ["#### 1234", "1,234.0 dollars", "1234 or 1235", "-1234", "none"]
    assert accuracies(reward, [prompt("1,234")] * 5, responses) == [1, 1, 0, 0, 0]
    reward.check([prompt("-1,234.5")])
    with pytest.raises(ValueError, match=r"the answer of toy:1 is not a number: 'four'"):
        reward.check([prompt("four")])


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("so it is\n#### 4", r"""type 'data\.answer_after="####"'"""),
        (r"so \boxed{4}", r"set reward\.verifier=math"),
        ("four", r"correct it, or set reward\.verifier=math or exact"),
    ],
)
def test_an_answer_that_is_no_number_names_what_reads_it(answer, remedy):
    reward = build_reward(config(verifier="number"))
    with pytest.raises(ValueError, match=remedy):
        reward.check([prompt(answer)])


def test_answer_pattern_takes_its_last_match_and_format_the_whole_response():
    reward = build_reward(
        config(
            accuracy_weight=0.9,
            format_weight=0.1,
            format_pattern="<think>.*</think><answer>.*</answer>",
            answer_pattern="<answer>(.*?)</answer>",
        )
    )
    cases = {  # total, accuracy, format
        "<think>a\nb</think><answer>4</answer>": (1.0, 1.0, 1.0),
        "<think></think><answer>3</answer><answer>4</answer>": (1.0, 1.0, 1.0),
        "<think></think><answer>4</answer><answer>3</answer>": (0.1, 0.0, 1.0),
        "x<answer>4</answer>": (0.9, 1.0, 0.0),
        "4": (0.0, 0.0, 0.0),
    }
    scores = reward.score([prompt()] * len(cases), list(cases), [False] * len(cases))
    for score, (total, accuracy, form) in zip(scores, cases.values(), strict=True):
        assert score.reward == pytest.approx(total) and score.correct is (accuracy == 1)
        assert score.parts == {"accuracy": accuracy, "format": form} and score.problem is None


def entry(task: str, seed: int = 1, **settings) -> Prompt:
    import reasoning_gym

    made = reasoning_gym.create_dataset(task, size=1, seed=seed, **settings)[0]
    return prompt(str(made["answer"]), f"reasoning_gym:{task}", made)


def test_generated_tasks_use_their_own_scorer():
    reward = build_reward(config(verifier="auto"))
    task = entry("chain_sum")
    reward.check([task])
    assert accuracies(reward, [task] * 3, [task.answer, f" {task.answer} ", f"{task.answer}1"]) == [
        1,
        1,
        0,
    ]


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_no_problem():
    reward = build_reward(config(verifier="reasoning_gym"))
    task = entry("prime_factorization")
    good, bad = reward.score([task] * 2, [task.answer, "no number"], [False] * 2)
    assert good.correct and not bad.correct and bad.problem is None and not reward.problems


@pytest.mark.parametrize(
    ("on_problem", "parts", "words"),
    [
        ("exclude", {"accuracy": 0.0}, "is left out: ValueError"),
        ("zero", {"accuracy": 0.0, "verifier_problem": 1.0}, "counts as wrong: ValueError"),
    ],
)
def test_what_becomes_of_a_response_whose_scorer_raises(caplog, on_problem, parts, words):
    """It raises at the expected answer too, so the task is at fault."""
    reward = build_reward(config(verifier="reasoning_gym", on_problem=on_problem))
    task = replace(entry("prime_factorization"), answer="none")
    bad, again = reward.score([task] * 2, ["no number"] * 2, [False] * 2)
    assert (bad.reward, bad.correct, bad.parts) == (0, False, parts)
    assert (bad.problem is not None) == (on_problem == "exclude")
    assert again == bad and reward.problems == {"reasoning_gym:prime_factorization: ValueError": 2}
    told = [record.getMessage() for record in caplog.records]
    assert sum(words in text for text in told) == 1, "logged once"


def test_a_response_without_a_verdict_may_stop_the_run():
    reward = build_reward(config(verifier="reasoning_gym", on_problem="stop"))
    task = entry("prime_factorization")
    assert reward.score([task], [task.answer], [False])[0].correct
    with pytest.raises(ValueError, match=r"on_problem = stop: a response to toy:1 .*ValueError"):
        reward.score([replace(task, answer="none")], ["no number"], [False])


@pytest.mark.parametrize("accuracy", [math.nan, 1.5, -0.5])
def test_a_verdict_that_is_no_accuracy_is_a_problem(accuracy):
    class Odd(Verifier):
        in_process = True

        def verify(self, task, answer):
            return Verdict(accuracy)

    register_verifier(f"odd{accuracy}")(Odd)
    (score,) = build_reward(config(verifier=f"odd{accuracy}")).score([prompt()], ["4"], [False])
    assert (score.reward, score.correct) == (0, False)
    assert score.problem == f"accuracy {accuracy} is not within [0, 1]"


def test_partial_credit_is_an_option():
    task = entry("spell_backward", min_word_len=5)
    almost = task.answer[:-1] + "#"
    assert accuracies(build_reward(config(verifier="reasoning_gym")), [task], [almost]) == [0]
    (score,) = build_reward(config(verifier="reasoning_gym", partial_credit=True)).score(
        [task], [almost], [False]
    )
    assert 0 < score.reward < 1 and not score.correct


def test_responses_are_never_run_as_code(tmp_path):
    """The scorers of these tasks evaluate the answer: the file would appear."""
    mark = tmp_path / "ran"
    reward = build_reward(config(verifier="reasoning_gym"))
    for task in ("countdown", "puzzle24"):
        assert accuracies(
            reward,
            [entry(task)] * 3,
            [f"open({str(mark)!r}, 'w')", "9**9**9**9**9", "9* *9* *9* *9"],
        ) == [0, 0, 0]
    assert accuracies(reward, [entry("countdown")], [entry("countdown").answer]) == [1]
    assert not mark.exists()
    for task in REFUSED:
        with pytest.raises(ValueError, match=rf"task {task}: its scorer .*; choose another task"):
            reward.check([prompt("", f"reasoning_gym:{task}", {"metadata": {}})])


def test_prompts_that_cannot_be_verified_are_all_named():
    reward = build_reward(config(verifier="auto"))
    wrong = [
        prompt(source="mine"),
        prompt(source="reasoning_gym:none", extra={"metadata": {}}),
        prompt("x", source="openai/gsm8k"),
    ]
    with pytest.raises(
        ValueError,
        match=(
            r"(?s)data source 'mine'; set reward\.verifier.*is not a number: 'x'.*task none: no"
            r" such task"
        ),
    ):
        reward.check(wrong)
    with pytest.raises(
        ValueError, match=r"for data sources 'a', 'b'; set reward\.verifier=number .*math .*exact"
    ):
        reward.check([prompt(source="b"), prompt(source="a")])
    with pytest.raises(ValueError, match="has no metadata"):
        reward.check([prompt(source="reasoning_gym:chain_sum")])
    known = ("gsm8k", "math_dapo", "HuggingFaceH4/aime_2024", "DigitalLearningGmbH/MATH-lighteval")
    reward.check([prompt(source=source) for source in known])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_pattern": "("}, r"reward\.answer_pattern = '\(': not a regular expression"),
        ({"answer_pattern": "a"}, r"reward\.answer_pattern = 'a': has no group"),
        (
            {"format_weight": 0.5},
            r"reward\.format_weight = 0\.5: there is no reward\.format_pattern",
        ),
    ],
)
def test_a_bad_reward_configuration_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_reward(config(**changes))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{}", ""),
        ("4", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_last_boxed_is_what_trying_every_start_finds():
    """The obvious way, which takes the square of the length."""

    def slow(text: str) -> str | None:
        start = text.rfind(r"\boxed{")
        while start >= 0:
            depth = 0
            for position in range(start + len(r"\boxed"), len(text)):
                depth += {"{": 1, "}": -1}.get(text[position], 0)
                if depth == 0:
                    return text[start + len(r"\boxed{") : position]
            start = text.rfind(r"\boxed{", 0, start)
        return None

    draw = random.Random(0)
    texts = [
        "".join(draw.choices([r"\boxed{", "{", "}", "x", r"\boxed"], k=draw.randrange(12)))
        for _ in range(3000)
    ]
    assert len({slow(text) for text in texts}) > 20
    for text in texts:
        assert last_boxed(text) == slow(text), text


def test_last_boxed_reads_a_collapsed_response_once():
    """100 000 boxes took hours before."""
    began = time.process_time()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" * 100_000 + "7" + "}" * 100_000) == "7"
    assert time.process_time() - began < 2


def test_math_answers_off_the_main_thread_with_time_outs():
    """One pool for all cases: its start takes a second. The power of powers blocks the worker,
    which is killed and replaced."""
    cases = [
        ("1/2", r"\boxed{0.5}", 1),
        ("1/2", r"so it is $\frac{1}{2}$", 1),
        ("3", r"\boxed{4}, no, \boxed{3}", 1),
        ("3", r"\boxed{3}, no, \boxed{4}", 0),
        ("0.5", r"\boxed{50\%}", 0),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("(1,2)", r"\boxed{(2, 1)}", 0),
        ("2", r"\boxed{9^{9^{9^{9}}}}", 0),
        ("4", r"\boxed{2+2}", 1),
        ("$ $", r"\boxed{5}", 0),
        ("$5", r"\boxed{5}", 1),
        ("7", "no idea", 0),
    ]
    reward = build_reward(config(verifier="math", timeout_s=3.0))
    golds, texts, verdicts = zip(*cases, strict=True)
    with ThreadPoolExecutor() as threads:
        tasks = [prompt(gold, "math") for gold in golds]
        found = threads.submit(accuracies, reward, tasks, texts).result()
    assert found == list(verdicts)
    reasons = " ".join(reward.problems)
    assert "within reward.timeout_s = 3 s" in reasons and "cannot be parsed" in reasons
    assert sum(reward.problems.values()) == 2
