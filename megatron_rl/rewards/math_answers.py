"""Mathematical equality of answers, judged by math-verify.

The library stops endless simplifications with a signal of its own, and a huge power blocks even
that; here its timers are off and the limits are those of the worker
(``megatron_rl.rewards.worker``).
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence

from megatron_rl.rewards.registry import register_verifier
from megatron_rl.rewards.verdict import Task, Verdict, Verifier

BOXED = r"\boxed{"
BRACES = re.compile(r"\\boxed\{|[{}]")
SOURCES = (
    r"(.*/)?(math|math_dapo|math-?500|MATH.*|competition_math|aime.*|AIME.*|amc.*|AMC.*|numina.*)"
)


def last_boxed(text: str) -> str | None:
    r"""Content of the complete ``\boxed{...}`` that begins last, braces matched; None without one.

    ``\boxed{1} no, \boxed{\frac{1}{2}}`` gives ``\frac{1}{2}``: an answer that is corrected counts
    as corrected, and a list of guesses counts as its last. One pass from left to right over the
    braces: a collapsed policy repeats ``\boxed{`` thousands of times.
    """
    # Of each brace that is open: whether it is a box's, and where its content begins.
    opened: list[tuple[bool, int]] = []
    start, end = -1, -1
    for found in BRACES.finditer(text):
        if found.group() != "}":
            opened.append((found.group() == BOXED, found.end()))
        elif opened:
            boxed, content = opened.pop()
            if boxed and content > start:
                start, end = content, found.start()
    return None if start < 0 else text[start:end]


@register_verifier("math", sources=SOURCES)
class MathVerifier(Verifier):
    r"""Accuracy 1 when the answer equals the expected one as mathematics: ``\frac{1}{2}``, ``0.5``
    and ``1/2`` are equal.

    Decisions: where the answer has ``\boxed``, only the last complete one is read; without, what
    math-verify finds last. ``50\%`` is not ``0.5``. What cannot be parsed is wrong. An expected
    answer that cannot be parsed, a time-out and an exhausted memory are wrong with a reason.
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

        expected, boxed = task.answer, last_boxed(answer)
        marked = expected.count("$") > 1 or "\\boxed" in expected  # a single $ is a currency
        gold = parse(expected if marked else f"${expected.replace('$', '')}$", parsing_timeout=None)
        if not gold:
            return Verdict(0.0, f"the expected answer {expected!r} cannot be parsed")
        found = parse(answer if boxed is None else rf"\boxed{{{boxed}}}", parsing_timeout=None)
        return Verdict(float(verify(gold, found, timeout_seconds=None)))
