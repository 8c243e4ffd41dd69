"""Tasks of the reasoning-gym package, judged by its own scorers."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.rewards.base import Options, Task, Verdict, Verifier
from megatron_rl.rewards.registry import limited, register_verifier

PREFIX = "reasoning_gym:"
# The package's scorers that must not judge, and why.
REFUSED: Mapping[str, str] = {
    "game_of_life_halting": "its scorer gives full marks to any text",
    "figlet_font": "its scorer gives marks for unrelated text",
    "propositional_logic": (
        "its scorer gives marks for unrelated text, and it has no answer to compare with"
    ),
    **dict.fromkeys(
        ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
        "its scorer runs the response as Python code",
    ),
    **dict.fromkeys(
        ("intermediate_integration", "polynomial_multiplication", "simple_integration"),
        "its scorer evaluates the response with sympy, which runs Python code",
    ),
}
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
# Their scorers evaluate the answer. Digits, brackets and the four operations cannot name anything
# and, without a power, are computed at once.
ARITHMETIC_ONLY = ("countdown", "puzzle24")
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[-+*/(). \d]{1,200}")


@register_verifier("reasoning_gym", sources=rf"{PREFIX}.+")
class GeneratedVerifier(Verifier):
    """Asks the scorer of the task that generated the prompt.

    ``task.data_source`` is ``reasoning_gym:<name>``, ``task.extra`` the generated entry (question,
    answer, metadata). Extracted is what the scorer is given: the whole response, unless
    ``reward.answer_pattern`` cuts the answer out.
    """

    reads_prompt = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._scorers: dict[str, Callable[[str, dict[str, Any]], float]] = {}

    def check(self, tasks: Sequence[Task]) -> list[str]:
        if importlib.util.find_spec("reasoning_gym") is None:
            return [
                f"{tasks[0].data_source} needs the package reasoning-gym; pip install reasoning-gym"
            ]
        by_source = {task.data_source: task for task in tasks}  # one of each is looked at
        problems = [self._problem(task) for task in by_source.values()]
        generated = (task for task in tasks if task.data_source.startswith(PREFIX))
        bare = [task for task in generated if "metadata" not in task.extra]
        if bare:
            problems.append(
                f"{bare[0].uid}: its extra has no metadata, which {bare[0].data_source} needs;"
                " map data.columns.extra to the entry"
            )
        return [problem for problem in problems if problem is not None]

    def _problem(self, task: Task) -> str | None:
        """The reason why prompts of this data source cannot be scored; None when they can."""
        if not task.data_source.startswith(PREFIX):
            return (
                f"data source {task.data_source!r} ({task.uid}) is no {PREFIX}<task>; choose"
                " another reward.verifier"
            )
        name = task.data_source.removeprefix(PREFIX)
        if name in REFUSED:
            return f"reasoning_gym task {name}: {REFUSED[name]}; choose another task"
        if self._scorer(name) is None:
            return f"reasoning_gym task {name}: no such task; correct the data source of {task.uid}"
        return None

    def prepare(self) -> None:
        import reasoning_gym.factory  # noqa: F401 (takes seconds, once for all workers)

    def verify(self, task: Task, answer: str) -> Verdict:
        name = task.data_source.removeprefix(PREFIX)
        answer = answer.strip()
        if name in ARITHMETIC_ONLY and not _ARITHMETIC.fullmatch(answer):
            return Verdict(0.0, extracted=answer)
        scorer = None if name in REFUSED else self._scorer(name)
        assert scorer is not None, f"{task.data_source} was not checked"
        try:
            accuracy = float(scorer(answer, dict(task.extra)))
        except _UNREADABLE:
            # Scorers raise at answers that they cannot read, which are wrong. At the expected one
            # they do not: where this raises too, the task or the scorer is at fault.
            scorer(task.answer, dict(task.extra))
            accuracy = 0.0
        return replace(limited(accuracy, self.options), extracted=answer)

    def _scorer(self, name: str) -> Callable[[str, dict[str, Any]], float] | None:
        if name not in self._scorers:
            from reasoning_gym import factory  # here, because runs on files do without it

            if name not in factory.DATASETS:
                return None
            self._scorers[name] = factory.get_score_answer_fn(name)
        return self._scorers[name]
