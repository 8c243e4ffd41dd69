"""Options of multiple-choice questions by their letters; other answers as mathematics or names."""

import re
from collections.abc import Sequence

from megatron_rl.rewards.base import Task, Verdict
from megatron_rl.rewards.math_answers import MathVerifier, last_boxed
from megatron_rl.rewards.registry import register_verifier

_SOURCES = r"(.*/)?(MathVista|MathVerse|MathVision|MMStar|MMMU|MMK12|EmoSet.*|WEBEmo|Emotion6)"
_OPTION = re.compile(r"[(\[]?([A-J])[)\]]?[.:]?")  # as an expected answer: "e" is a number
_LETTER = re.compile(_OPTION.pattern, re.IGNORECASE)
# "(B) 12 cm", "B. 12 cm", "B: 12 cm": a letter with a mark, and the text of the option.
_LABELED = re.compile(r"(?:[(\[]([A-J])[)\]]|([A-J])[).:])\s*\S.*", re.IGNORECASE | re.DOTALL)
# "the answer is (B)", "option B": the last one counts.
_NAMED = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s+is)?\s*:?\s*(?:[(\[]([A-Ja-j])[)\]]|([A-J])\b)"
)
# Neither the article nor the pronoun.
_ALONE = re.compile(r"(?<![A-Za-z'])([B-HJ]|A(?!\s+(?!or\b|and\b)[a-z]))(?![A-Za-z'])")
_NAME = re.compile(r"[A-Za-z][A-Za-z' -]+")  # of a class
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def chosen_letter(answer: str, choices: Sequence[str] = ()) -> str | None:
    r"""The letter of the option that an answer chooses; None where it chooses none, or several.

    In this order: a letter alone, ``(B)``; the text of one of ``choices``; a letter before its
    text, ``B. 12 cm``, and no other; ``the answer is B``; the only capital that stands alone.
    """
    text = _TEXT.sub(r"\1", answer).replace("$", "").strip()
    if (alone := _LETTER.fullmatch(text)) is not None:
        return alone[1].upper()
    for name, choice in zip("ABCDEFGHIJ", choices, strict=False):
        if _same(text, choice):
            return name
    letters = set(_ALONE.findall(text))
    if (labeled := _LABELED.fullmatch(text)) is not None:
        label = (labeled[1] or labeled[2]).upper()
        if letters <= {label}:
            return label
    named = _NAMED.findall(text)
    if named:
        return "".join(named[-1]).upper()
    return letters.pop() if len(letters) == 1 else None


def _same(first: str, second: str) -> bool:
    return first.strip(" .").casefold() == second.strip(" .").casefold()


@register_verifier("choice", sources=_SOURCES)
class ChoiceVerifier(MathVerifier):
    r"""Where the expected answer is a letter, accuracy 1 when the answer chooses that option
    (``chosen_letter``, in its last box where it has one); extracted is the letter.

    An expected answer of letters alone is the name of a class, and compared as a text without
    regard to its case; any other is compared as mathematics.
    """

    def verify(self, task: Task, answer: str) -> Verdict:
        boxed = last_boxed(answer)
        given = answer if boxed is None else boxed
        answer_there = (last_boxed(task.answer) or task.answer).strip()
        expected = _OPTION.fullmatch(answer_there)
        if expected is not None:
            letter = chosen_letter(given, task.extra.get("choices", ()))
            return Verdict(float(letter == expected[1]), extracted=letter or "")
        if _NAME.fullmatch(answer_there) is None:
            return super().verify(task, answer)
        text = _TEXT.sub(r"\1", given)
        return Verdict(float(_same(text, answer_there)), extracted=text.strip(" .").casefold())
