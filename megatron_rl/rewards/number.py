"""The last number of the answer is the expected one (the convention of GSM8K)."""

import re
from collections.abc import Sequence
from decimal import Decimal

from megatron_rl.config.cli.overrides import typed
from megatron_rl.rewards.base import Task, Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier

# Linear in the text: no two parts of it match the same character, so at most one group of three
# digits is tried again. A minus right after a word, a digit or a closing bracket is a subtraction.
# Commas separate groups of three digits only.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in ``text``; None where there is none.

    ``"so 3 + 4 = 7."`` is 7, ``"$1,234.50"`` is 1234.5, ``"9-3"`` is 3, ``"x = -3"`` is -3,
    ``"1/2"`` is 2 (no fractions).
    """
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def plain(number: Decimal) -> str:
    """The digits of a number, without exponent; equal numbers give equal texts.

    Example: 7.00 and 7 are ``"7"``, 1e3 is ``"1000"``, -0.50 is ``"-0.5"``, -0 is ``"0"``.
    """
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if number == 0 else text  # -0 has its sign in the text


def _not_a_number(task: Task) -> str:
    """With the setting that fits the form of this answer."""
    answer = task.answer
    shown = answer if len(answer) <= 60 else "..." + answer[-57:]  # its end tells most
    remedy = "correct it, or set reward.verifier=math or exact"
    if "####" in answer:
        remedy = "the number is behind a marker: type " + typed("data.answer_after", "####")
    elif "\\boxed" in answer:
        remedy = "set reward.verifier=math, which reads what is in the box"
    return f"the answer of {task.uid} is not a number: {shown!r}; {remedy}"


@register_verifier("number", sources=r"(openai/)?gsm8k")
class NumberVerifier(Verifier):
    """Equality of decimal numbers: 7, 7.0 and 7.00 are one number, 0.1 + 0.2 is no issue."""

    in_process = True
    reads_prompt = False

    def check(self, tasks: Sequence[Task]) -> list[str]:
        # With a currency or a percent sign at most.
        answers = [(task, task.answer.strip().lstrip("$").rstrip("%")) for task in tasks]
        return [_not_a_number(task) for task, text in answers if not NUMBER.fullmatch(text)]

    def verify(self, task: Task, answer: str) -> Verdict:
        number = last_number(answer)
        if number is None:
            return Verdict(0.0, extracted="")
        is_right = number == last_number(task.answer)
        return Verdict(float(is_right), extracted=plain(number))
