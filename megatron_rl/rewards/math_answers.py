"""Mathematical equality of answers, judged by math-verify.

The library stops endless simplifications with a signal of its own, and a huge power blocks even
that; here its timers are off, and the limits of the worker hold
(``megatron_rl.rewards.workers.worker``).
"""

import importlib.util
import logging
import re
from collections.abc import Sequence

from megatron_rl.rewards.base import Task, Verdict, Verifier
from megatron_rl.rewards.registry import register_verifier

_BOXED = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")
_SOURCES = (
    r"(.*/)?(math|math_dapo|math-?500|MATH.*|competition_math"
    r"|aime.*|AIME.*|amc.*|AMC.*|numina.*)"
)


def last_boxed(text: str) -> str | None:
    r"""Content of the complete ``\boxed{...}`` that begins last, braces matched; None without one.

    ``\boxed{1} no, \boxed{\frac{1}{2}}`` gives ``\frac{1}{2}``: an answer that is corrected counts
    as corrected, and a list of guesses counts as its last. One pass from left to right over the
    braces: a collapsed policy repeats ``\boxed{`` thousands of times.
    """
    # Of each open brace: whether it is a box's, and where its content begins.
    opened: list[tuple[bool, int]] = []
    last: slice | None = None
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            opened.append((brace.group() == _BOXED, brace.end()))
        elif opened:
            boxed, begin = opened.pop()
            # Boxes close from the inside out; the one that begins last counts.
            if boxed and (last is None or begin > last.start):
                last = slice(begin, brace.start())
    return None if last is None else text[last]


@register_verifier("math", sources=_SOURCES)
class MathVerifier(Verifier):
    r"""Accuracy 1 when the answer equals the expected one as mathematics.

    ``\frac{1}{2}``, ``0.5`` and ``1/2`` are equal; ``50\%`` is not ``0.5``. Where the answer has
    ``\boxed``, only the last complete one is read; without, what math-verify finds last. The same
    holds for the expected answer, which may be a whole solution (MATH). What cannot be parsed is
    wrong. An expected answer that cannot be parsed, a time-out and exhausted
    memory are wrong with a reason. Extracted is the text as math-verify has normalized it: ``0.5``
    and ``\frac{1}{2}`` are one vote, ``1/2`` without a box is another.
    """

    reads_prompt = False

    def check(self, tasks: Sequence[Task]) -> list[str]:
        if importlib.util.find_spec("math_verify") is None:
            return [
                "reward.verifier = math needs the package math-verify; "
                "pip install 'math-verify[antlr4-9-3]'"
            ]
        return []

    def prepare(self) -> None:
        import math_verify

        # It warns that its own time-outs are off.
        logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)

    def verify(self, task: Task, answer: str) -> Verdict:
        from math_verify import parse, verify

        expected = last_boxed(task.answer) or task.answer
        # The library reads formulas between dollars only; a single $ is a currency.
        if expected.count("$") <= 1:
            expected = f"${expected.replace('$', '')}$"
        gold = parse(expected, parsing_timeout=None)
        if not gold:
            return Verdict(0.0, f"the expected answer {task.answer!r} cannot be parsed")
        boxed = last_boxed(answer)
        if boxed is not None:
            answer = rf"\boxed{{{boxed}}}"
        given = parse(answer, parsing_timeout=None)
        is_right = float(verify(gold, given, timeout_seconds=None))
        # What is read comes last in the library's answer, as normalized text. Its expressions say
        # more, but printing one can take as long as it likes.
        text = given[-1] if given and isinstance(given[-1], str) else ""
        return Verdict(is_right, extracted="".join(text.split()))
