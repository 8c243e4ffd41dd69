"""The reward of a run: accuracy by a verifier, format by a regular expression, weighted."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.exact import ExactVerifier
from megatron_rl.rewards.generated import PREFIX, GeneratedVerifier
from megatron_rl.rewards.math_answers import MathVerifier
from megatron_rl.rewards.number import NumberVerifier
from megatron_rl.rewards.verdict import Verdict, Verifier
from megatron_rl.types import Prompt, Score

LOGGER = logging.getLogger(__name__)

# Data source -> verifier, for ``reward.verifier = auto``. The first pattern that matches the whole name decides.
BY_DATA_SOURCE = (
    (re.compile(rf"{PREFIX}.+"), "reasoning_gym"),
    (re.compile(r"(openai/)?gsm8k"), "number"),
    (re.compile(r"(.*/)?(math|math_dapo|math-?500|MATH.*|competition_math|aime.*|AIME.*|amc.*|AMC.*|numina.*)"), "math"),
)

CHOICES = (
    "set reward.verifier=number (the answer is a number), math (LaTeX, \\boxed), exact (the same "
    "text), or give rows a data_source that is known (gsm8k, math, aime, ..., reasoning_gym:<task>)"
)


def _listed(sources: Sequence[str]) -> str:
    """``data source 'a'``, ``data sources 'a', 'b', ...``."""
    names = ", ".join(map(repr, sources[:5])) + (", ..." if len(sources) > 5 else "")
    return f"data source{'s' * (len(sources) > 1)} {names}"


class WeightedReward:
    """reward = accuracy_weight * accuracy + format_weight * format.

    ``accuracy`` is the verifier's; ``format`` is 1 when the whole response matches ``format_pattern``. A response is judged by its
    text alone, truncated or not: penalties for length belong to the method. ``problems`` counts why verifiers could not judge.
    """

    def __init__(self, config: RewardConfig, verifiers: dict[str, Verifier]) -> None:
        self.problems: Counter[str] = Counter()
        self._config, self._verifiers = config, verifiers
        self._format = re.compile(config.format_pattern, re.DOTALL) if config.format_pattern is not None else None
        self._answer = re.compile(config.answer_pattern, re.DOTALL) if config.answer_pattern is not None else None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """To call before any work.

        Raises:
            ValueError: these prompts cannot be verified: a data source no verifier is known for, a refused task, a bad answer.
        """
        unknown = sorted({prompt.data_source for prompt in prompts if self._name(prompt) is None})
        found = [f"no verifier is known for {_listed(unknown)}; {CHOICES}"] if unknown else []
        for name, verifier in self._verifiers.items():
            found += verifier.check([prompt for prompt in prompts if self._name(prompt) == name])
        if found:
            more = f"\n  ... {len(found) - 10} more" if len(found) > 10 else ""
            raise ValueError(f"reward.verifier = {self._config.verifier}:\n  - " + "\n  - ".join(found[:10]) + more)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]) -> list[Score]:
        """One score a response; ``prompts[i]`` is the prompt of ``responses[i]``. ``parts``: accuracy, format (where there is a
        pattern) and verifier_problem (1 where the verifier could not judge)."""
        assert len(prompts) == len(responses) == len(truncated)
        verdicts: dict[int, Verdict] = {}
        for name, verifier in self._verifiers.items():
            rows = [row for row, prompt in enumerate(prompts) if self._name(prompt) == name]
            answers = {row: self.answer(responses[row]) for row in rows}
            verdicts |= {row: Verdict(0.0) for row in rows if answers[row] is None}
            rows = [row for row in rows if answers[row] is not None]
            if rows:
                verdicts |= zip(rows, verifier.verify([prompts[row] for row in rows], [answers[row] or "" for row in rows]), strict=True)
        assert len(verdicts) == len(prompts), "prompts were not checked"
        return [self._score(prompt, response, verdicts[row]) for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))]

    def answer(self, response: str) -> str | None:
        """First group of the last match of ``answer_pattern``; None where it does not match; the whole response without one."""
        if self._answer is None:
            return response
        matches = list(self._answer.finditer(response))
        return matches[-1].group(1) if matches else None

    def _score(self, prompt: Prompt, response: str, verdict: Verdict) -> Score:
        parts = {"accuracy": verdict.accuracy, "verifier_problem": float(verdict.problem is not None)}
        reward = self._config.accuracy_weight * verdict.accuracy
        if self._format is not None:
            parts["format"] = float(self._format.fullmatch(response) is not None)
            reward += self._config.format_weight * parts["format"]
        if verdict.problem is not None:
            self._note(prompt, verdict.problem)
        return Score(reward=reward, correct=verdict.accuracy == 1, parts=parts)

    def _note(self, prompt: Prompt, problem: str) -> None:
        kind = f"{prompt.data_source}: {problem.partition(':')[0]}"
        if kind not in self.problems:
            message = "a response to %s could not be judged and counts as wrong: %s (said once; see reward/part/verifier_problem)"
            LOGGER.warning(message, prompt.uid, problem)
        self.problems[kind] += 1

    def _name(self, prompt: Prompt) -> str | None:
        if self._config.verifier != "auto":
            return self._config.verifier
        return next((name for pattern, name in BY_DATA_SOURCE if pattern.fullmatch(prompt.data_source)), None)


def build_reward(config: RewardConfig) -> WeightedReward:
    """The reward ``config`` describes. No process starts before the first response that needs one.

    Raises:
        ValueError: a pattern is no regular expression or lacks its group, a format weight without a pattern, a missing package.
    """
    for key, pattern in (("format_pattern", config.format_pattern), ("answer_pattern", config.answer_pattern)):
        if pattern is None:
            continue
        try:
            groups = re.compile(pattern, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"reward.{key} = {pattern!r}: not a regular expression ({error}); correct it") from error
        if key == "answer_pattern" and groups == 0:
            raise ValueError(f"reward.{key} = {pattern!r}: has no group; put brackets around the answer")
    if config.format_weight != 0 and config.format_pattern is None:
        raise ValueError(f"reward.format_weight = {config.format_weight}: there is no reward.format_pattern; give one, or a weight of 0")
    makers = {
        "reasoning_gym": lambda: GeneratedVerifier(partial_credit=config.partial_credit),
        "math": lambda: MathVerifier(timeout_s=config.timeout_s, num_workers=config.num_workers),
        "exact": ExactVerifier,
        "number": NumberVerifier,
    }
    names = sorted({name for _, name in BY_DATA_SOURCE}) if config.verifier == "auto" else [config.verifier]
    return WeightedReward(config, {name: makers[name]() for name in names})
