"""Answers to multiple-choice questions: the option that each chooses, and the verdict, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.base import Options, Task
from megatron_rl.rewards.choice import ChoiceVerifier, chosen_letter
from megatron_rl.rewards.registry import verifier_of_source

CHOICES = ("12 cm", "15 cm", "A cat")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        (" B. ", "B"),
        (r"$\text{B}$", "B"),
        ("B. 15 cm", "B"),
        ("(b) 15 cm", "B"),
        ("15 cm", "B"),
        ("15 CM.", "B"),
        ("A cat", "C"),  # the text of a choice, not the letter A
        ("The answer is B", "B"),
        ("Option C, since the answer is (B).", "B"),  # the last one that is named
        ("Answer: B", "B"),
        ("The correct one must be B.", "B"),
        ("A dog is not I, so B it is", "B"),  # neither article nor pronoun
        ("(A) is wrong, and so is (B)", None),
        ("A or B", None),
        ("17 cm", None),
        ("", None),
        ("K", None),
    ],
)
def test_the_option_that_an_answer_chooses(answer, letter):
    assert chosen_letter(answer, CHOICES) == letter


def verdict(expected: str, answer: str, **extra):
    options = Options(
        partial_credit=False, timeout_s=5.0, memory_bytes=1 << 30, sandbox="bubblewrap"
    )
    return ChoiceVerifier(options).verify(Task("t:1", expected, "s", extra=extra), answer)


@pytest.mark.parametrize(
    ("expected", "answer", "accuracy"),
    [
        ("B", r"so \boxed{A}, no, \boxed{B}", 1.0),
        ("B", r"(B) was tempting, but \boxed{A}", 0.0),
        ("(B)", "B", 1.0),
        (r"\boxed{B}", r"\boxed{\text{(B)}}", 1.0),
        ("B", "nothing", 0.0),
        ("1.2", r"\boxed{\frac{6}{5}}", 1.0),  # of a question without options
        ("1.2", r"\boxed{1.3}", 0.0),
        ("e", r"\boxed{e}", 1.0),  # mathematics: an option is a capital
        ("amusement", r"\boxed{Amusement}", 1.0),
        ("fear", r"\boxed{fare}", 0.0),  # as products of letters they would be equal
    ],
)
def test_verdicts(expected, answer, accuracy):
    found = verdict(expected, answer)
    assert found.accuracy == accuracy and found.problem is None


def test_extracted_answers_vote():
    assert verdict("B", "(b)").extracted == verdict("A", "The answer is B").extracted == "B"
    assert verdict("B", "15 cm", choices=["12 cm", "15 cm"]).accuracy == 1.0
    assert verdict("B", "nothing").extracted == ""
    assert verdict("awe", r"\boxed{ Awe. }").extracted == "awe"


def test_the_sets_that_it_is_for():
    names = ("AI4Math/MathVista", "MMMU/MMMU", "Lin-Chen/MMStar", "xodhks/EmoSet118K")
    assert {verifier_of_source(name) for name in names} == {"choice"}
    assert verifier_of_source("hiyouga/geometry3k") is None
