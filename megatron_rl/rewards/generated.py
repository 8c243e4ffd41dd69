"""Tasks of the reasoning-gym package, judged by its own scorers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.rewards.verdict import Verdict
from megatron_rl.runtime.random_state import preserved_random_state
from megatron_rl.types import Prompt

PREFIX = "reasoning_gym:"
REFUSED: Mapping[str, str] = {
    "game_of_life_halting": "its scorer gives full marks to any text",
    "figlet_font": "its scorer gives marks for unrelated text",
    "propositional_logic": "its scorer gives marks for unrelated text, and it has no answer to compare with",
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), "its scorer runs the response as Python code"),
    **dict.fromkeys(
        ("intermediate_integration", "polynomial_multiplication", "simple_integration"),
        "its scorer evaluates the response with sympy, which runs Python code",
    ),
}
# Their scorers evaluate the answer. Digits, brackets and the four operations name nothing and, without a power, end at once.
ARITHMETIC_ONLY = ("countdown", "puzzle24")
ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[-+*/(). \d]{1,200}")


class GeneratedVerifier:
    """``prompt.data_source`` is ``reasoning_gym:<task>`` and ``prompt.extra`` the generated entry (question, answer, metadata)."""

    def __init__(self, *, partial_credit: bool) -> None:
        """``partial_credit``: keep fractions; otherwise a score below 1 is 0."""
        self._partial_credit = partial_credit
        self._scorers: dict[str, Callable[[str, dict[str, Any]], float]] = {}

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        found = []
        for prompt in {prompt.data_source: prompt for prompt in prompts}.values():
            task = prompt.data_source.removeprefix(PREFIX)
            if not prompt.data_source.startswith(PREFIX):
                found.append(f"data source {prompt.data_source!r} ({prompt.uid}) is no {PREFIX}<task>; choose another reward.verifier")
            elif task in REFUSED:
                found.append(f"reasoning_gym task {task}: {REFUSED[task]}; choose another task")
            elif self._scorer(task) is None:
                found.append(f"reasoning_gym task {task}: no such task; correct the data source of {prompt.uid}")
        bare = [prompt for prompt in prompts if prompt.data_source.startswith(PREFIX) and "metadata" not in prompt.extra]
        if bare:
            found.append(
                f"{bare[0].uid}: its extra has no metadata, which {bare[0].data_source} needs; map data.columns.extra to the entry"
            )
        return found

    def verify(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Verdict]:
        with preserved_random_state():
            return [self._one(prompt, answer.strip()) for prompt, answer in zip(prompts, answers, strict=True)]

    def _one(self, prompt: Prompt, answer: str) -> Verdict:
        task = prompt.data_source.removeprefix(PREFIX)
        if task in ARITHMETIC_ONLY and not ARITHMETIC.fullmatch(answer):
            return Verdict(0.0)
        scorer = None if task in REFUSED else self._scorer(task)
        assert scorer is not None, f"{prompt.data_source} was not checked"
        try:
            score = float(scorer(answer, dict(prompt.extra)))
        except Exception as error:  # noqa: BLE001 - scorers raise anything on text they did not expect; the reason is kept
            return Verdict(0.0, f"{type(error).__name__}: {error}")
        if not 0 <= score <= 1:
            return Verdict(0.0, f"score {score} is not within [0, 1]")
        return Verdict(score if self._partial_credit else float(score == 1))

    def _scorer(self, task: str) -> Callable[[str, dict[str, Any]], float] | None:
        if task not in self._scorers:
            from reasoning_gym import factory  # takes seconds, and runs on files do without

            if task not in factory.DATASETS:
                return None
            self._scorers[task] = factory.get_score_answer_fn(task)
        return self._scorers[task]
