"""The answer is the expected text, letter for letter, but for white space around it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.rewards.verdict import Verdict
from megatron_rl.types import Prompt


def is_exact(answer: str, expected: str) -> bool:
    """Whether the two texts are equal after removing white space at both ends."""
    return answer.strip() == expected.strip()


class ExactVerifier:
    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        return []

    def verify(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Verdict]:
        return [Verdict(float(is_exact(answer, prompt.answer))) for prompt, answer in zip(prompts, answers, strict=True)]
